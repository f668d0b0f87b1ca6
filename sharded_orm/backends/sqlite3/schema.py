"""Django's schema editor for SQLite. It counts its open editors in the connection object."""

from __future__ import annotations

from django.db.backends.sqlite3 import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    """Django's schema editor. While it is open, ``connection.open_editors`` counts it, which shows
    that a migration is running.
    """
