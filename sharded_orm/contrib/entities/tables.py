"""Makes the sharded models whose tables hold entities and index rows.

The models are made when a store or an index is declared. ``makemigrations`` finds them like models
that are written as classes, and new properties of entities need no further migrations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.db.backends.utils import truncate_name

from sharded_orm.models.base import ShardedModel
from sharded_orm.models.fields import TimestampedIDField
from sharded_orm.models.relations.model_class import ShardedModelBase

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index
    from sharded_orm.contrib.entities.store import DataStore

#: The columns of a table of entities, without its shard key.
ENTITY_COLUMNS = ("added_id", "id", "updated", "version", "body", "marked_at", "pending")
#: The columns of a table of index rows, without the columns of the properties.
INDEX_COLUMNS = ("pk", "entity_id", "version")


@dataclass(frozen=True)
class TableName:
    """The names of a table that is made for a store or an index.

    :param app: the label of the app that declares the store.
    :param model: the name of the model.
    :param table: the name of the table.
    """

    app: str
    model: str
    table: str

    @classmethod
    def of_store(cls, store: DataStore) -> TableName:
        app = _label(store.module)
        return cls(app, f"{_camel_case(store.name)}Entity", f"{app}_{store.name}_entities")

    @classmethod
    def of_index(cls, index: Index) -> TableName:
        app = _label(index.store.module)
        return cls(app, _camel_case(index.name), f"{app}_{index.name}")


def entity_model(store: DataStore) -> type[ShardedModel]:
    """Return a new model whose rows are the entities of ``store`` (the design is FriendFeed's, FF1)."""
    # The primary keys are unique over all shards, so that entities can move between shards with
    # their keys. Numbers that each shard counts by itself would repeat on other shards.
    columns: dict[str, Any] = {
        "added_id": TimestampedIDField(primary_key=True),
        # The id alone is unique only if the store is sharded by it. If the store is sharded by a
        # property, a constraint below makes the pair of property and id unique. Its index also
        # serves queries by property and id.
        "id": models.UUIDField(unique=store.shard_on is None),
        "updated": models.DateTimeField(),
        "version": models.BigIntegerField(),
        # Empty after the entity was deleted. The row stays until the cleaner has removed the
        # entity's index rows.
        "body": models.BinaryField(),
        # The time at which the entity was marked for the cleaner; NULL if it is not marked. It is marked
        # while its index rows may be missing or left over.
        "marked_at": models.DateTimeField(null=True, db_index=True),
        # Index rows of the entity's earlier versions, a line of JSON each. These rows may still be
        # stored.
        "pending": models.TextField(null=True),
    }
    if store.shard_on is not None:
        columns[store.shard_on] = store.fields[store.shard_on].clone()
    name = TableName.of_store(store)
    options: dict[str, Any] = {
        "db_table": name.table,
        "verbose_name_plural": f"{store.name} entities",
    }
    if store.shard_on is not None:
        options["constraints"] = [
            models.UniqueConstraint(fields=[store.shard_on, "id"], name=_short(f"{name.table}_id"))
        ]
    return _model(store.module, name.model, columns, options, store.group, store.shard_on or "id")


def index_model(index: Index) -> type[ShardedModel]:
    """Return a new model for the rows of ``index`` (FriendFeed, FF2)."""
    store = index.store
    columns: dict[str, Any] = {name: store.fields[name].clone() for name in index.names}
    columns["entity_id"] = models.UUIDField(db_index=True)
    columns["pk"] = models.CompositePrimaryKey(*index.names, "entity_id")
    # The version of the entity at the last write of this index row.
    columns["version"] = models.BigIntegerField()
    if store.shard_on is not None and store.shard_on not in columns:
        columns[store.shard_on] = store.fields[store.shard_on].clone()
    name = TableName.of_index(index)
    options: dict[str, Any] = {"db_table": name.table, "default_permissions": ()}
    if index.unique:
        options["constraints"] = [
            models.UniqueConstraint(fields=list(index.names), name=_short(f"{name.table}_unique"))
        ]
    if len({*index.descending[index.names.index(index.shard_on) + 1 :]}) > 1:
        # Some properties are sorted in ascending order, and others in descending order. The primary
        # key can only be read forwards or backwards as a whole, so the table needs one more
        # database index. (The condition looks only at the properties after the shard key, because a
        # query names one value for each property up to the shard key, so they are not sorted.)
        ordered = [
            f"-{name}" if descends else name
            for name, descends in zip(index.names, index.descending, strict=True)
        ]
        ordered.append("-entity_id" if index.descending[-1] else "entity_id")
        options["indexes"] = [models.Index(fields=ordered, name=_short(f"{name.table}_order"))]
    return _model(store.module, name.model, columns, options, index.group, index.shard_on)


class EntityTable(ShardedModel):
    """The base class of the generated models. By it a system check sees that they need this app."""

    class Meta:
        abstract = True


def _model(
    module: str,
    name: str,
    columns: Mapping[str, Any],
    options: Mapping[str, Any],
    group: str,
    shard_key: str,
) -> type[ShardedModel]:
    attributes = {
        "__module__": module,
        "__qualname__": name,
        "Meta": type("Meta", (), dict(options)),
        "ShardMeta": type("ShardMeta", (), {"group": group, "shard_key": shard_key}),
        **columns,
    }
    model: type[ShardedModel] = ShardedModelBase(name, (EntityTable,), attributes)
    return model


def _label(module: str) -> str:
    config = apps.get_containing_app_config(module)
    if config is None:
        raise ImproperlyConfigured(
            f"A DataStore is declared in {module!r}, which is not in an installed app. Declare it in the"
            " models module of an app in INSTALLED_APPS."
        )
    return config.label


def _short(name: str) -> str:
    """Return the name of an index or constraint, shortened to the 30 characters that Django allows."""
    return truncate_name(name, 30, hash_len=8)


def _camel_case(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
