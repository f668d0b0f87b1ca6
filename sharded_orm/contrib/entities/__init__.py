"""Entities without a schema, and index tables of their own (FriendFeed, FF1 to FF6).

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
    # Imports a class when it is first used (PEP 562): Django imports this package before models can
    # be imported.
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
