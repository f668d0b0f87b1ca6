"""Let all shards share what ``django.contrib.postgres`` queries about types of extensions.

For each alias that connects, ``django.contrib.postgres`` queries the numbers of the types hstore
and citext. All schemas of a database have the same types. So this module queries them once per
pool, not for each of thousands of shards. The alias of a whole shard group refuses SQL, and needs
no numbers, because the sessions of its shards convert the values. For ordinary aliases, nothing
changes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.contrib.postgres import signals
from django.db import connections

from sharded_orm.backends.group.alias import GroupAliasMixin

#: A pair: the numbers (oids) of all types with one name, and the numbers of their array types.
#: There may be several, because each schema can have a type of this name.
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
    """Replace the function with which ``django.contrib.postgres`` queries the numbers of extension
    types.

    From then on, they are queried once per pool, and never for shard groups. Further calls do
    nothing.
    """
    # django.contrib.postgres has no hook for this, so replace get_type_oids(), which its functions
    # for hstore and citext call. It would not be enough to replace the receiver of the signal
    # connection_created, which calls these functions when an alias connects. The app's ready() also
    # calls them, for each alias in use and even for groups, whenever INSTALLED_APPS is overridden.
    signals.get_type_oids = _type_oids
