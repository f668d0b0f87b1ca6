"""Checks that the database compares text shard keys as exactly as the router does.

For the router, ``Ada``, ``ada`` and ``Ada `` are three keys, perhaps on three shards. If the
collation of a key column considers them equal, a query for one key also returns those rows of the
other keys that are on the same shard. So a table with such a column is refused at its first use in
a process, before any statement on the table is sent.
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
from sharded_orm.backends.key_guard import ColumnType, ColumnTypes
from sharded_orm.exceptions import InexactShardKey, InvalidShardKey
from sharded_orm.models.fields.text import exact_collation
from sharded_orm.models.sharding.options import shard_options, target_field

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# Fields whose values every database compares exactly, unlike text. A UUID may be stored as text,
# but Django writes each UUID in only one way, so equal UUIDs are equal texts.
_COMPARED_BY_VALUE = (
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
# The usual types of text columns. If a column that compares keys inexactly has another type, the
# error message also names the type.
_TEXT_TYPES = frozenset({"varchar", "tinytext", "text", "mediumtext", "longtext"})
_COLLATE = re.compile(r"\bCOLLATE\s+[\"'\[`]?(\w+)", re.IGNORECASE)


@dataclass(frozen=True)
class KeyColumn:
    """A text column of a sharded model's own table whose values determine the shard.

    :param target: the field at the end of the chain of foreign keys that begins with ``field``;
        ``field`` itself if it is not a foreign key.
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
    def is_colocated_with_target(self) -> bool:
        """Whether the table of ``target`` is in the same databases as the table of this column.

        If so, a migration that changes ``target`` also changes this column, because Django changes
        the columns of foreign keys together with the column to which they refer.
        """
        options, target_options = shard_options(self.model), shard_options(self.target.model)
        return (
            options is not None
            and target_options is not None
            and options.group == target_options.group
        )

    def declared_collation(self, connection: Any) -> str | None:
        """Return the collation that the model declares; None for the table's default collation.

        Sends no query, except one for the server's version if it is not known yet.
        """
        parameters = self.field.db_parameters(connection)
        if collation := parameters.get("collation"):
            return str(collation)
        written = _COLLATE.search(parameters["type"] or "")
        return written[1] if written else None


@dataclass(frozen=True)
class InexactKey:
    """A text key column of one shard, in which the database treats different keys as equal.

    :param what: what is wrong with the column, as the end of a sentence that begins with the
        column's name. For example, "has the collation …".
    :param remedy: what the operator has to do, in sentences.
    """

    shard: Shard
    key: KeyColumn
    what: str
    remedy: str


def text_keys(group: str) -> Mapping[str, tuple[KeyColumn, ...]]:
    """Map the name of each table of ``group`` to its text columns that determine a row's shard.

    Tables without such a column are left out. Sends no query. The result is empty until Django has
    loaded all models.
    """
    return _text_keys(group) if apps.models_ready else {}


@lru_cache
def _text_keys(group: str) -> Mapping[str, tuple[KeyColumn, ...]]:
    keys_by_table: dict[str, tuple[KeyColumn, ...]] = {}
    for model in apps.get_models(include_auto_created=True):
        options = shard_options(model)
        if options is not None and options.group == group and (keys := key_columns(model)):
            keys_by_table[model._meta.db_table] = keys
    return keys_by_table


def key_columns(model: Any) -> tuple[KeyColumn, ...]:
    """Return the text columns of the model's own table whose values determine a row's shard.

    Sends no query.
    """
    options = shard_options(model)
    if options is None or model._meta.proxy:
        return ()
    return tuple(
        KeyColumn(model, field, target)
        for field in model._meta.local_concrete_fields
        if field.column in options.columns
        and not isinstance(target := target_field(field), _COMPARED_BY_VALUE)
    )


def declared_inexact_collation(key: KeyColumn, collations: Collations) -> str | None:
    """Return the collation that the models declare for ``key`` if it makes different keys equal.

    Return None if the models declare no collation, or one that may compare keys exactly. In
    these cases, only the column in the database shows whether it does.
    """
    collation: str | None = getattr(key.target, "db_collation", None)
    if not collation:
        return None
    inexact = collations.is_inexact_key(
        collation, is_colocated_with_target=key.is_colocated_with_target
    )
    return collation if inexact else None


def inexact_keys(connection: Any, shards: Sequence[Shard]) -> Iterator[InexactKey]:
    """Yield an :class:`InexactKey` for each text key column that a shard compares inexactly.

    All of ``shards`` must be of one group and on one node. Tables that do not exist are skipped.
    Costs one query per 500 shards, or none if the group has no text keys. On SQLite, no query is
    sent, because the collations that the models declare are checked instead.

    :param connection: a connection to the node.
    """
    keys = text_keys(shards[0].group) if shards else {}
    if not keys:
        return
    types = _column_types(connection, shards, keys)
    for shard in shards:
        for key in (key for columns in keys.values() for key in columns):
            inexact = _inexact_key(connection, shard, key, types)
            if inexact is not None:
                yield inexact


def _column_types(
    connection: Any, shards: Sequence[Shard], keys: Mapping[str, tuple[KeyColumn, ...]]
) -> ColumnTypes:
    if not features_of(connection).can_introspect_collations:
        return {}
    columns = sorted({key.field.column for table_keys in keys.values() for key in table_keys})
    types: ColumnTypes = connection.column_types(shards, list(keys), columns)
    return types


def _column_type(types: ColumnTypes, shard: Shard, key: KeyColumn) -> ColumnType | None:
    table = types.get(shard.alias, {}).get(key.table.lower(), {})
    return table.get(key.field.column.lower())


def _inexact_key(
    connection: Any, shard: Shard, key: KeyColumn, types: ColumnTypes
) -> InexactKey | None:
    if not features_of(connection).can_introspect_collations:
        collation = key.declared_collation(connection)
        if collation is None or collation.upper() == "BINARY":
            return None
        return InexactKey(
            shard, key, f"has the collation {collation!r}", _remedy(connection, key, None)
        )
    column = _column_type(types, shard, key)
    if column is None or column.is_exact:
        return None
    what = f"has the collation {column.collation!r}"
    if column.data_type not in _TEXT_TYPES:
        what = f"has the type {column.data_type.upper()} and the collation {column.collation!r}"
    return InexactKey(shard, key, what, _remedy(connection, key, column))


def _remedy(connection: Any, key: KeyColumn, column: ColumnType | None) -> str:
    collation = exact_collation(connection)
    if column is not None and not key.is_colocated_with_target:
        # The column is a foreign key to another group or to the global database. A migration of the
        # referenced model does not run on these shards, so tell the operator to change this column
        # with RunSQL.
        change = features_of(connection).collations.exact_column_sql(
            key.table, key.field.column, column.definition, collation or ""
        )
        app = key.model._meta.app_label
        return (
            f"Change it by a migration of {app!r} with RunSQL: {change}. Then run migrate_shards."
        )
    target = key.target
    exact = f"db_collation={collation!r}" if collation else "no db_collation"
    by_name = f"with {exact}, or " if hasattr(target, "db_collation") else ""
    return (
        f"Declare {target.model._meta.label}.{target.name} {by_name}as an ExactCharField, then run"
        " makemigrations and migrate_shards."
    )


def describe_inexact(key: KeyColumn, what: str) -> str:
    """Return a sentence which says that the database takes different keys in the column for equal.

    The sentence has no full stop at its end.

    :param what: why the database does so, as in :class:`InexactKey`.
    """
    return (
        f"{key.label} tells the shard, and its column {key.table}.{key.field.column} {what}, by which"
        " the database takes different keys for equal, such as 'Ada', 'ada' and 'Ada '. The router"
        " does not"
    )


#: Maps the name of a table to pairs (text key column, type of the column in the database). On
#: SQLite, the type is None.
_Tables = Mapping[str, tuple[tuple[KeyColumn, ColumnType | None], ...]]


@dataclass(frozen=True)
class _Verified:
    """The tables of one shard that passed the check: the database compares their text keys exactly.

    :param node: the node that had the shard at the time of the check.
    """

    node: str
    tables: _Tables


class TextKeyGuard:
    """Checks tables with text keys (shard keys that are text) at their first use on a shard.

    Thread-safe.

    A process sends one query for all such tables of a shard, or of several shards on one node. It
    sends no query for groups without text keys, or on SQLite. A failed check is repeated at the
    next use of the table, because its column may have been changed.

    While a schema editor is open on the shard, every table is accepted. One migration may write to
    a table before a later migration corrects the collation of its column.
    """

    def __init__(self) -> None:
        self._verified: dict[str, _Verified] = {}
        self._shared_tables: dict[Any, _Tables] = {}

    def forget(self) -> None:
        """Forget which tables were checked, because settings or tables may have changed."""
        self._verified = {}

    def guards(self, group: str, tables: Iterable[str]) -> bool:
        """Whether one of ``tables`` may have a text key, so that :meth:`check` must be called.

        Implements :meth:`sharded_orm.backends.key_guard.KeyGuard.guards`.
        """
        return not apps.models_ready or not text_keys(group).keys().isdisjoint(tables)

    def check(self, connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
        """Check the text keys of ``tables`` on ``shards``, except tables that were checked before.

        Implements :meth:`sharded_orm.backends.key_guard.KeyGuard.check`.

        :raises InexactShardKey: the database treats different keys in one of ``tables`` as equal.
        """
        keys = text_keys(shards[0].group)
        if not keys:
            return
        checked = [table for table in tables if table in keys]
        if not checked or connection.open_editors:
            return
        if connection.shard is shards[0] and connection._generation != relocation.generation:
            # The topology has changed since this connection object got its settings. Make it
            # connect to the node that has the shard now.
            relocation.follow(connection)
            shards = (connection.shard,)
        unverified = [shard for shard in shards if not self._is_verified(shard, checked)]
        if unverified:
            self._verify(connection, unverified, keys, checked)

    def check_rows(self, shard: Shard, query: Any) -> None:
        """Check that the text keys of the rows that ``query`` inserts are not too long.

        Implements :meth:`sharded_orm.backends.key_guard.KeyGuard.check_rows`.

        :raises InvalidShardKey: a key is too long. The database would cut it, and so store another
            key.
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

    def _is_verified(self, shard: Shard, tables: Sequence[str]) -> bool:
        known = self._verified.get(shard.alias)
        return (
            known is not None
            and known.node == shard.node
            and all(table in known.tables for table in tables)
        )

    def _verify(
        self,
        connection: Any,
        shards: Sequence[Shard],
        keys: Mapping[str, tuple[KeyColumn, ...]],
        checked: Sequence[str],
    ) -> None:
        prepare_shards(shards[0].group, shards)
        types = _column_types(connection, shards, keys)
        for shard in shards:
            verified = {}
            for table, columns in keys.items():
                inexact = next(
                    (
                        inexact_key
                        for key in columns
                        if (inexact_key := _inexact_key(connection, shard, key, types))
                    ),
                    None,
                )
                if inexact is not None and table in checked:
                    raise InexactShardKey(
                        f"{describe_inexact(inexact.key, inexact.what)}: on shard {shard.alias!r} rows would"
                        f" be missed, and those of other keys be read and changed. {inexact.remedy}"
                        " 'manage.py shards check' lists all such columns."
                    )
                columns_with_types = tuple(
                    (key, _column_type(types, shard, key)) for key in columns
                )
                exists = not features_of(connection).can_introspect_collations or all(
                    column_type for _, column_type in columns_with_types
                )
                if inexact is None and exists:
                    verified[table] = columns_with_types
            # To save memory, shards with the same tables share one mapping. Two threads may check a
            # shard at the same time, so replace the shard's entry and do not change it. Both store
            # the same result.
            tables = self._shared_tables.setdefault(tuple(verified.items()), verified)
            self._verified[shard.alias] = _Verified(shard.node, tables)


guard = TextKeyGuard()
