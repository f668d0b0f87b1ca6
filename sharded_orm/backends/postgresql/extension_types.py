"""Share the types of extensions between the shards, for ``django.contrib.postgres``.

``django.contrib.postgres`` queries the numbers of the types hstore and citext for each alias that
connects. All schemas of a database have the same types, so this module queries them once per pool,
not once for each of thousands of shards. The alias of a whole shard group refuses SQL, and needs no
numbers: values pass through the sessions of its shards. Other aliases are treated as with Django's
backend.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.contrib.postgres import signals
from django.db import connections

from sharded_orm.backends.group.alias import GroupAliasMixin

#: The type numbers (oids) of all types with one name, and those of their array types. Several
#: schemas can have a type of the same name.
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
    """Let ``django.contrib.postgres`` query the numbers of extension types only once per pool, and
    never for shard groups.

    Further calls do nothing.
    """
    # django.contrib.postgres has no hook for this, so replace get_type_oids(), which its functions
    # for hstore and citext call. Replacing its receiver of connection_created is not enough: the
    # app's ready() calls these functions for each alias in use, even for groups, whenever
    # INSTALLED_APPS is overridden.
    signals.get_type_oids = _type_oids
