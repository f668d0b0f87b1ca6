"""Checks the declarations of stores and indexes.

A wrong declaration raises an error at once, and not in a system check, because no table may be made
from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.apps import apps

from sharded_orm.contrib.entities.exceptions import InvalidStore
from sharded_orm.contrib.entities.properties import FIELDS
from sharded_orm.contrib.entities.tables import (
    ENTITY_COLUMNS,
    INDEX_COLUMNS,
    EntityTable,
    TableName,
)
from sharded_orm.models.base import ShardedModel

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index
    from sharded_orm.contrib.entities.store import DataStore

#: Arguments of ``Index.get_all()`` that are no properties.
_ARGUMENTS = ("self", "limit", "after")
_ATTRIBUTES = {*dir(ShardedModel), "ShardMeta", "_state"}
#: The largest length of a table's name, on PostgreSQL.
_MAX_TABLE_NAME = 63


def check_store(store: DataStore, declared_in: str | None) -> None:
    """Check the declaration of ``store``, before its model is made.

    :param declared_in: the module that has declared a store of this name before, or None.
    :raises InvalidStore: the declaration cannot work. The message lists the reasons.
    """
    problems = []
    if not store.name.isidentifier():
        problems.append(f"its name {store.name!r} is no name of Python")
    if declared_in not in (None, store.module):
        problems.append(f"{declared_in!r} declares a store of this name, too")
    for name, field in store.fields.items():
        problems += _name_problems(name)
        problems += _field_problems(name, field)
    if reserved := sorted({*store.fields} & {*ENTITY_COLUMNS, *INDEX_COLUMNS}):
        problems.append(f"fields name {reserved!r}, which are columns of its tables")
    if store.shard_on is not None and store.shard_on not in store.fields:
        problems.append(f"shard_on={store.shard_on!r} is none of its fields")
    problems = problems or _table_problems(TableName.of_store(store))
    if problems:
        raise InvalidStore(f"DataStore {store.name!r}: " + "; ".join(problems))


def check_index(index: Index, properties: Any) -> None:
    """Check the declaration of ``index``, before its model is made.

    :param properties: the argument ``properties`` of the index.
    :raises InvalidStore: the declaration cannot work. The message lists every reason.
    """
    problems = []
    if not index.name.isidentifier():
        problems.append(f"its name {index.name!r} is no name of Python")
    if index.name in {other.name for other in index.store.indexes}:
        problems.append(f"the store has another index {index.name!r}")
    if isinstance(properties, str):
        problems.append(f"properties={properties!r} is a text. Pass a list of names")
    else:
        unknown = [name for name in index.names if name not in index.store.fields]
        if unknown:
            problems.append(f"the store declares no fields for {unknown!r}")
        if len(set(index.names)) < len(index.names) or not index.names:
            problems.append(f"properties are {list(index.names)!r}; name each once")
        if index.shard_on not in index.names:
            problems.append(f"shard_on={index.shard_on!r} is none of its properties")
    problems = problems or _namesakes(index) or _table_problems(TableName.of_index(index))
    if problems:
        raise InvalidStore(f"Index {index.label!r}: " + "; ".join(problems))


def _name_problems(name: str) -> Iterator[str]:
    if not name.isidentifier() or name.endswith("_") or "__" in name:
        yield (
            f"{name!r} is no name of a field. Use letters, digits and single underscores, and none at"
            " the end"
        )
    elif name in _ARGUMENTS:
        yield f"a field cannot have the name {name!r}, as get_all() has an argument of this name"
    elif name in _ATTRIBUTES and name not in INDEX_COLUMNS:
        yield f"a field cannot have the name {name!r}, which is an attribute of every model"


def _field_problems(name: str, field: Any) -> Iterator[str]:
    if not isinstance(field, FIELDS) or field.primary_key:
        kind = "class" if isinstance(field, type) else type(field).__name__
        yield (
            f"the field of {name!r} is a {kind}. Use an integer field, a BooleanField, a DateField, a"
            " DateTimeField, a UUIDField, or an ExactCharField for text"
        )
        return
    if field.null or field.has_default():
        yield (
            f"the field of {name!r} has null or default. Leave them out: an entity without the"
            " property is in no index with it"
        )
    if getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False):
        yield (
            f"the field of {name!r} has auto_now or auto_now_add, which would change the values in"
            " indexes. Set the property before put()"
        )
    if field.unique:
        yield f"the field of {name!r} has unique. Declare an Index with unique=True instead"


def _table_problems(table: TableName) -> list[str]:
    problems = []
    if len(table.table) > _MAX_TABLE_NAME:
        problems.append(
            f"its table {table.table!r} has a name of more than {_MAX_TABLE_NAME} characters"
        )
    other = apps.all_models[table.app].get(table.model.lower())
    # If its module is loaded again, a store or index finds its own former model.
    if other is not None and not (
        issubclass(other, EntityTable) and other._meta.db_table == table.table
    ):
        problems.append(
            f"the app {table.app!r} has another model {other.__name__!r}, and its model would have this"
            " name, too"
        )
    return problems


def _namesakes(index: Index) -> list[str]:
    """Return a sentence about each other store whose index would have the same table."""
    from sharded_orm.contrib.entities.store import stores

    app = index.store.model._meta.app_label
    return [
        f"store {store.name!r} of the app {app!r} has an index of this name, and its table"
        for store in stores.values()
        if store.name != index.store.name
        and store.model._meta.app_label == app
        and index.name in {other.name for other in store.indexes}
    ]
