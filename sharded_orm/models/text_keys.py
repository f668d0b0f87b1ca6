"""Keys of text: equal for the database if and only if they are equal for the router.

The router tells ``Ada``, ``ada`` and ``Ada `` apart. A column whose collation does not would answer
with rows of another key that happens to be on the same shard, and miss those that are on another
one. Such a table is refused at its first use in a process, before anything is sent to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.db import models

from sharded_orm.backends.collations import Collations
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.test_databases import prepare_shards
from sharded_orm.backends.text_keys import ColumnType, ColumnTypes
from sharded_orm.exceptions import InexactShardKey, InvalidShardKey
from sharded_orm.models.fields.text import exact_collation
from sharded_orm.models.sharding.options import shard_options, target_field

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# What is compared by value on every database. A UUID is written in one way where it is text.
_BY_VALUE = (
    models.IntegerField,
    models.AutoField,
    models.BooleanField,
    models.DecimalField,
    models.FloatField,
    models.DateField,
    models.TimeField,
    models.DurationField,
    models.UUIDField,
    models.BinaryField,
)
_COLLATE = re.compile(r"\bCOLLATE\s+[\"'\[`]?(\w+)", re.IGNORECASE)


@dataclass(frozen=True)
class KeyColumn:
    """A column of a sharded model, in its own table, whose values are text and tell the shard.

    :param target: of a foreign key, in the end the field that it refers to.
    """

    model: Any
    field: Any
    target: Any

    @property
    def table(self) -> str:
        return str(self.model._meta.db_table)

    @property
    def label(self) -> str:
        return f"{self.model._meta.label}.{self.field.name}"

    @property
    def is_beside_target(self) -> bool:
        """Whether a migration of the field that is compared in the end runs on this table, too."""
        own, theirs = shard_options(self.model), shard_options(self.target.model)
        return own is not None and theirs is not None and own.group == theirs.group

    def declared(self, connection: Any) -> str | None:
        """The collation that the model declares; None for the default of the table.

        May ask the server for its version, and for nothing else.
        """
        parameters = self.field.db_parameters(connection)
        if collation := parameters.get("collation"):
            return str(collation)
        written = _COLLATE.search(parameters["type"] or "")
        return written[1] if written else None


@dataclass(frozen=True)
class InexactKey:
    """A key column on a shard that compares its values in another way than the router.

    :param what: its collation, as the end of a sentence about the column.
    :param remedy: what to do, in sentences.
    """

    shard: Shard
    key: KeyColumn
    what: str
    remedy: str


def text_keys(group: str) -> Mapping[str, tuple[KeyColumn, ...]]:
    """The key columns of all models of ``group``, by table. Asks no database."""
    return _text_keys(group) if apps.models_ready else {}


@lru_cache
def _text_keys(group: str) -> Mapping[str, tuple[KeyColumn, ...]]:
    found: dict[str, tuple[KeyColumn, ...]] = {}
    for model in apps.get_models(include_auto_created=True):
        options = shard_options(model)
        if options is not None and options.group == group and (keys := key_columns(model)):
            found[model._meta.db_table] = keys
    return found


def key_columns(model: Any) -> tuple[KeyColumn, ...]:
    """The key columns of text in the own table of a sharded model. Asks no database."""
    options = shard_options(model)
    if options is None or model._meta.proxy:
        return ()
    return tuple(
        KeyColumn(model, field, target)
        for field in model._meta.local_concrete_fields
        if field.column in options.columns
        and not isinstance(target := target_field(field), _BY_VALUE)
    )


def declared_inexact(key: KeyColumn, collations: Collations) -> str | None:
    """The collation that is declared for ``key``, if it alone tells that it is wrong."""
    collation: str | None = getattr(key.target, "db_collation", None)
    if not collation:
        return None
    inexact = collations.is_inexact_key(collation, is_beside_target=key.is_beside_target)
    return collation if inexact else None


def inexact_keys(connection: Any, shards: Sequence[Shard]) -> Iterator[InexactKey]:
    """What is wrong with keys of text on ``shards``, which are of one group and node.

    A table that does not exist is passed over. One query per 500 shards; none on SQLite, where the
    models tell, nor where no key is text.

    :param connection: of their node.
    """
    keys = text_keys(shards[0].group) if shards else {}
    if not keys:
        return
    types = _types(connection, shards, keys)
    for shard in shards:
        for key in (key for several in keys.values() for key in several):
            wrong = _wrong(connection, shard, key, types)
            if wrong is not None:
                yield wrong


def _types(
    connection: Any, shards: Sequence[Shard], keys: Mapping[str, tuple[KeyColumn, ...]]
) -> ColumnTypes:
    if not features_of(connection).can_introspect_collations:
        return {}
    columns = sorted({key.field.column for several in keys.values() for key in several})
    found: ColumnTypes = connection.column_types(shards, list(keys), columns)
    return found


def _type_of(types: ColumnTypes, shard: Shard, key: KeyColumn) -> ColumnType | None:
    table = types.get(shard.alias, {}).get(key.table.lower(), {})
    return table.get(key.field.column.lower())


def _wrong(connection: Any, shard: Shard, key: KeyColumn, types: ColumnTypes) -> InexactKey | None:
    if not features_of(connection).can_introspect_collations:
        collation = key.declared(connection)
        if collation is None or collation.upper() == "BINARY":
            return None
        return InexactKey(
            shard, key, f"has the collation {collation!r}", _remedy(connection, key, None)
        )
    column = _type_of(types, shard, key)
    if column is None or column.is_exact:
        return None
    what = f"has the collation {column.collation!r}"
    if column.data_type in ("char", "enum", "set"):
        what = f"has the type {column.data_type.upper()} and the collation {column.collation!r}"
    return InexactKey(shard, key, what, _remedy(connection, key, column))


def _remedy(connection: Any, key: KeyColumn, column: ColumnType | None) -> str:
    collation = exact_collation(connection)
    if column is not None and not key.is_beside_target:
        # A migration of the other model neither runs on the shards, nor may touch their tables.
        definition = column.definition.removesuffix(" NOT NULL").removesuffix(" NULL")
        null = column.definition.removeprefix(definition)
        app = key.model._meta.app_label
        return (
            f"Change it by a migration of {app!r} with RunSQL: ALTER TABLE `{key.table}` MODIFY"
            f" `{key.field.column}` {definition} COLLATE {collation}{null}. Then run migrate_shards."
        )
    target = key.target
    exact = f"db_collation={collation!r}" if collation else "no db_collation"
    by_name = f"with {exact}, or " if hasattr(target, "db_collation") else ""
    return (
        f"Declare {target.model._meta.label}.{target.name} {by_name}as an ExactCharField, then run"
        " makemigrations and migrate_shards."
    )


def describe_inexact(key: KeyColumn, what: str) -> str:
    """What is wrong, in a sentence without its end."""
    return (
        f"{key.label} tells the shard, and its column {key.table}.{key.field.column} {what}, by which"
        " the database takes different keys for equal, such as 'Ada', 'ada' and 'Ada '. The router"
        " does not"
    )


#: Table -> its columns of text, and what they are; None on SQLite.
_Tables = Mapping[str, tuple[tuple[KeyColumn, ColumnType | None], ...]]


@dataclass(frozen=True)
class _Verified:
    """What is known to be right of a shard.

    :param node: where that was seen.
    """

    node: str
    tables: _Tables


class TextKeyGuard:
    """Looks at each table with keys of text at its first use on a shard; thread-safe.

    One query for all such tables of a shard, in each process once, and one for several shards of a
    node. None for groups without keys of text, and none on SQLite. What is wrong is not remembered:
    a process goes on once the column was changed.

    While a schema editor is open on the shard, nothing is refused: a migration that mends a column
    may come after one that fills its table.
    """

    def __init__(self) -> None:
        self._verified: dict[str, _Verified] = {}
        self._looks: dict[Any, _Tables] = {}

    def forget(self) -> None:
        """The settings have changed, or tables may have."""
        self._verified = {}

    def check(self, connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
        """See :meth:`sharded_orm.backends.text_keys.KeyGuard.check`.

        :raises InexactShardKey: one of ``tables`` does not compare keys as the router does.
        """
        keys = text_keys(shards[0].group)
        if not keys:
            return
        asked = [table for table in tables if table in keys]
        if not asked or connection.open_editors:
            return
        if connection.shard is shards[0] and connection._generation != relocation.generation:
            # The statement goes to where the shard is now.
            relocation.follow(connection)
            shards = (connection.shard,)
        unknown = [shard for shard in shards if not self._knows(shard, asked)]
        if unknown:
            self._look(connection, unknown, keys, asked)

    def check_rows(self, shard: Shard, query: Any) -> None:
        """See :meth:`sharded_orm.backends.text_keys.KeyGuard.check_rows`.

        :raises InvalidShardKey: what the database would store is another key.
        """
        known = self._verified.get(shard.alias)
        columns = () if known is None else known.tables.get(query.get_meta().db_table, ())
        for key, column in columns:
            if column is None:
                continue
            for row in query.objs:
                value = row.__dict__.get(key.field.attname)
                if isinstance(value, str) and not column.holds(value):
                    raise InvalidShardKey(
                        f"{value!r} does not fit into {key.label} ({column.definition}), which tells"
                        " the shard: the database would store a part of it, which is another key."
                        " Shorten it, or give the field a larger max_length."
                    )

    def _knows(self, shard: Shard, tables: Sequence[str]) -> bool:
        known = self._verified.get(shard.alias)
        return (
            known is not None
            and known.node == shard.node
            and all(table in known.tables for table in tables)
        )

    def _look(
        self,
        connection: Any,
        shards: Sequence[Shard],
        keys: Mapping[str, tuple[KeyColumn, ...]],
        asked: Sequence[str],
    ) -> None:
        prepare_shards(shards[0].group, shards)
        types = _types(connection, shards, keys)
        for shard in shards:
            good = {}
            for table, columns in keys.items():
                wrong = next(
                    (w for key in columns if (w := _wrong(connection, shard, key, types))), None
                )
                if wrong is not None and table in asked:
                    raise InexactShardKey(
                        f"{describe_inexact(wrong.key, wrong.what)}: on shard {shard.alias!r} rows would"
                        f" be missed, and those of other keys be read and changed. {wrong.remedy}"
                        " 'manage.py shards check' lists all such columns."
                    )
                found = tuple((key, _type_of(types, shard, key)) for key in columns)
                exists = not features_of(connection).can_introspect_collations or all(
                    each for _, each in found
                )
                if wrong is None and exists:
                    good[table] = found
            # Replaced whole: two threads that come at once find the same. Shards look alike, so
            # there is one copy for all.
            tables = self._looks.setdefault(tuple(good.items()), good)
            self._verified[shard.alias] = _Verified(shard.node, tables)


guard = TextKeyGuard()
