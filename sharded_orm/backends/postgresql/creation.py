"""Django's class that creates test databases, for ordinary aliases."""

from __future__ import annotations

from django.db.backends.postgresql import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    pass
