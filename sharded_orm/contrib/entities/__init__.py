"""Stores objects without a schema, and finds them by index tables (FriendFeed, FF1 to FF6).

An *entity* is a dict of properties with an id. The properties are stored as compressed JSON in one
column, so a new property needs no migration. For each index, a separate table maps values of
properties to ids of entities.

An app of Django: add ``"sharded_orm.contrib.entities"`` to ``INSTALLED_APPS``, and declare a
:class:`DataStore` with its :class:`Index` objects in the ``models`` module of an app. See
docs/howto/entities.md and docs/decisions/0051-entities.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["DataStore", "Entity", "EntityPage", "Index"]

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.entity import Entity
    from sharded_orm.contrib.entities.index import EntityPage, Index
    from sharded_orm.contrib.entities.store import DataStore


def __getattr__(name: str) -> Any:
    # Import a class only when it is first used (PEP 562). Django imports this package while it
    # loads the apps, when models cannot be imported yet.
    if name == "DataStore":
        from sharded_orm.contrib.entities.store import DataStore

        return DataStore
    if name == "Entity":
        from sharded_orm.contrib.entities.entity import Entity

        return Entity
    if name in ("Index", "EntityPage"):
        from sharded_orm.contrib.entities import index

        return getattr(index, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
