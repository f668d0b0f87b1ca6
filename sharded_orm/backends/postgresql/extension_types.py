"""Keeps ``django.contrib.postgres`` from asking a group for the types of extensions.

When this app is loaded, it asks each alias that is in use for the types of hstore and citext. That
happens again if ``INSTALLED_APPS`` is overridden. The alias of a group refuses SQL. It needs no answer:
values pass through the sessions of its shards, for whose aliases the app asks when they connect.
"""

from __future__ import annotations

from functools import wraps

from django.contrib.postgres import signals
from django.db import connections

from sharded_orm.backends.group.alias import GroupAliasMixin

_stock_type_oids = signals.get_type_oids


@wraps(_stock_type_oids)
def _type_oids(connection_alias: str, type_name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(connections[connection_alias], GroupAliasMixin):
        return (), ()
    oids: tuple[tuple[int, ...], tuple[int, ...]] = _stock_type_oids(connection_alias, type_name)
    return oids


def spare_groups() -> None:
    """Let ``django.contrib.postgres`` find no types of extensions at the alias of a group.

    Further calls do nothing.
    """
    # The app has no hook for this. Its functions for hstore and for citext call get_type_oids().
    signals.get_type_oids = _type_oids
