"""The types of extensions, for which ``django.contrib.postgres`` asks.

That app asks each alias for the numbers of the types hstore and citext when the alias connects, and
when the app is loaded while the alias is in use. All schemas of a database have the same types. So
each pool is asked once, in place of thousands of shards. The alias of a group refuses SQL. It needs
no answer: values pass through the sessions of its shards. Any other alias asks for itself, as with
Django's backend.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.contrib.postgres import signals
from django.db import connections

from sharded_orm.backends.group.alias import GroupAliasMixin

#: The numbers of the types of one name, and those of their arrays.
Oids = tuple[tuple[int, ...], tuple[int, ...]]

_stock_type_oids = signals.get_type_oids


@wraps(_stock_type_oids)
def _type_oids(connection_alias: str, type_name: str) -> Oids:
    connection: Any = connections[connection_alias]
    if isinstance(connection, GroupAliasMixin):
        return (), ()
    if getattr(connection, "schema", None) is None:
        return _stock_type_oids(connection_alias, type_name)
    known: dict[str, Oids] = connection.node_pool.type_oids
    if type_name not in known:
        known[type_name] = _stock_type_oids(connection_alias, type_name)
    return known[type_name]


def share_types() -> None:
    """Let ``django.contrib.postgres`` ask each pool once, and no group. Further calls do nothing."""
    # The app has no hook for this. Its functions for hstore and for citext call get_type_oids(). A
    # receiver of connection_created in place of the app's own would not do: ready() also calls the
    # app's receiver for each alias in use, groups included, whenever INSTALLED_APPS is overridden.
    signals.get_type_oids = _type_oids
