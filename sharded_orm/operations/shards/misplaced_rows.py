"""Find misplaced rows. A misplaced row is not on the shard of its shard key, so queries miss it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.apps import apps
from django.db import DatabaseError, Error, connections
from django.db.models import BigIntegerField, Field, IntegerField

from sharded_orm import runtime
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.shards.status import error_line
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

#: Number of shards that one statement reads, if the database can read several at once.
BATCH = 256
#: Size of a batch: the number of shard keys, read from rows, whose shards are looked up together.
KEYS = 5000
#: Largest number of keys that are reported as examples, for each table of each shard.
EXAMPLES = 3
_BIG_INTEGER: Any = BigIntegerField()


@dataclass(frozen=True, slots=True)
class StrayKey:
    """A shard key that has rows on a wrong shard.

    :param home: the alias of the right shard; None if the key has no shard.
    :param why: the strategy's explanation why the key belongs on ``home``, or has no shard.
    """

    key: Any
    home: str | None
    why: str


@dataclass
class Misplaced:
    """The misplaced rows in one table of one shard.

    :param shard: the shard that has the rows, although they belong to other shards or to none.
    :param model: the model's label.
    :param key_name: the name of the shard key's field.
    :param keys: number of distinct shard keys of the misplaced rows.
    :param rows: number of misplaced rows; if a sample was read, only those in the sample.
    :param examples: some of these shard keys, each with the shard on which it belongs.
    """

    shard: Shard
    model: str
    key_name: str
    keys: int = 0
    rows: int = 0
    examples: list[StrayKey] = field(default_factory=list)


@dataclass
class RowScan:
    """A scan for misplaced rows, and its results.

    Not thread-safe: give each thread its own instance, and merge the instances with :meth:`add`.

    :param sample: number of rows to read from each table of each shard, in the order of the primary
        key. If the primary key is an integer, the sample begins at a random row; otherwise at the
        first row. None reads all rows.
    :param looked_at: number of rows that were checked.
    """

    sample: int | None
    looked_at: int = 0
    misplaced: list[Misplaced] = field(default_factory=list)
    #: Why rows could not be checked. The reason is stored under the alias of the shard if its rows
    #: could not be read, and under the group's name if the look-up of a key's shard failed.
    errors: dict[str, str] = field(default_factory=dict)

    def read(self, wrapper: Any, shards: Sequence[Shard], alive: Alive) -> None:
        """Check whether the rows on ``shards`` are on the shard of their key.

        ``shards`` must all be on one node and belong to one group.

        Cost for each model: a sample takes one statement per 256 shards. A scan of all rows takes
        one statement per shard, as does any scan on SQLite. If the group's keys are in the
        directory (the table of the shard of each key), there is one more query per 500 keys.
        Memory: the keys of one batch.

        :param wrapper: a connection object of the node. It belongs to no shard.
        :param alive: called after each batch, to report that the node answers.
        """
        if not shards:
            return
        for options in sharded_models(shards[0].group):
            table = _Table(options, connections[shards[0].alias], self.sample)
            misplaced: dict[str, Misplaced] = {}
            batch: list[tuple[Shard, Any, int]] = []
            for row in self._rows(table, wrapper, shards):
                batch.append(row)
                if len(batch) >= KEYS:
                    self._check_rows(options, batch, misplaced)
                    batch.clear()
                    alive()
            self._check_rows(options, batch, misplaced)
            self.misplaced += misplaced.values()
            alive()

    def add(self, other: RowScan) -> None:
        """Add to this object the results in ``other``, which come from another node."""
        self.looked_at += other.looked_at
        self.misplaced += other.misplaced
        self.errors.update(other.errors)

    def _rows(
        self, table: _Table, wrapper: Any, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, Any, int]]:
        if self.sample is not None and wrapper.features.can_union_shards:
            for start in range(0, len(shards), BATCH):
                yield from self._read_union(table, wrapper, shards[start : start + BATCH])
            return
        for shard in shards:
            try:
                yield from table.read_one(wrapper, shard)
            except DatabaseError as exc:
                self._note_failure(shard, exc)

    def _read_union(
        self, table: _Table, wrapper: Any, shards: Sequence[Shard]
    ) -> list[tuple[Shard, Any, int]]:
        try:
            return table.read_several(wrapper, shards)
        except DatabaseError as exc:
            if len(shards) == 1 or is_node_gone(exc):
                self._note_failure(shards[0], exc)
                return []
        # If one shard cannot be read, for example because it lacks the table, the statement fails
        # for all shards. So read the two halves of the shards by separate statements.
        middle = len(shards) // 2
        return [
            *self._read_union(table, wrapper, shards[:middle]),
            *self._read_union(table, wrapper, shards[middle:]),
        ]

    def _note_failure(self, shard: Shard, exc: DatabaseError) -> None:
        if is_node_gone(exc):
            raise exc
        self.errors[shard.alias] = error_line(exc)

    def _check_rows(
        self,
        options: ShardOptions,
        rows: Iterable[tuple[Shard, Any, int]],
        misplaced: dict[str, Misplaced],
    ) -> None:
        rows = list(rows)
        try:
            homes = _homes(options.group, {key for _, key, _ in rows})
        except Error as exc:
            # This error comes from the server of the directory (the table of the shard of each
            # key), not from the node with the rows. So report it under the group's name.
            self.errors[options.group] = f"its keys cannot be looked up ({error_line(exc)})"
            return
        strays: dict[tuple[str, Any], tuple[Shard, int]] = {}
        for shard, key, count in rows:
            self.looked_at += count
            if homes[key] != shard.number:
                before = strays.get((shard.alias, key), (shard, 0))[1]
                strays[shard.alias, key] = (shard, before + count)
        for (alias, key), (shard, count) in strays.items():
            entry = misplaced.setdefault(
                alias, Misplaced(shard, options.model._meta.label, _key_field(options).name)
            )
            entry.keys += 1
            entry.rows += count
            if len(entry.examples) < EXAMPLES:
                entry.examples.append(_stray_key(options.group, key, homes[key]))


def sharded_models(group: str) -> list[ShardOptions]:
    """Return the models of ``group`` whose own table has the shard key, sorted by label.

    Automatic many-to-many tables are left out, because foreign keys keep the rows of these tables on
    the right shard.
    """
    models = []
    for model in apps.get_models():
        options = shard_options(model)
        meta = model._meta
        if options is not None and options.group == group and options.key is not None:
            # With multi-table inheritance, only the parent's table has the shard key. So leave the
            # child model out.
            is_own = options.key in meta.local_concrete_fields
            if meta.managed and not meta.proxy and is_own:
                models.append(options)
    return sorted(models, key=lambda options: options.model._meta.label)


class _Table:
    """A model's table on any shard, with the statements that read its shard keys."""

    def __init__(self, options: ShardOptions, wrapper: Any, sample: int | None) -> None:
        self._wrapper = wrapper
        self._sample = sample
        quote = wrapper.ops.quote_name
        key = _key_field(options)
        self._field = key
        self._column = key.get_col(options.model._meta.db_table)
        compiler = options.model._base_manager.none().query.get_compiler(connection=wrapper)
        self._compiler = compiler
        self._converters = compiler.get_converters([self._column])
        self._table = quote(options.model._meta.db_table)
        self._key = quote(key.column)
        pks = options.model._meta.pk_fields
        self._pks = [quote(pk.column) for pk in pks]
        # The SQL type with which to CAST an integer primary key. None for other primary keys: their
        # sample begins at the first row, not at a random one.
        number = len(pks) == 1 and isinstance(target_field(pks[0]), IntegerField)
        self._number = _BIG_INTEGER.cast_db_type(wrapper) if number else None

    def _select(self, schema: str | None) -> tuple[str, list[Any]]:
        table = self._table if schema is None else f"{schema}.{self._table}"
        if self._sample is None:
            return f"SELECT {self._key}, COUNT(*) FROM {table} GROUP BY {self._key}", []
        order = ", ".join(self._pks)
        limit = f"ORDER BY {order} LIMIT {self._sample:d}"
        if self._number is None:
            return f"SELECT {self._key}, 1 FROM {table} {limit}", []
        (pk,) = self._pks
        start = f"(SELECT MIN({pk}) + CAST(%s * (MAX({pk}) - MIN({pk})) AS {self._number}) FROM {table})"
        # Read rows from a random primary key on. If too few follow, go on at the table's beginning.
        parts = (
            f"SELECT * FROM (SELECT {self._key}, {turn} turn FROM {table}"
            f" WHERE {pk} {compared} {start} {limit}) part{turn}"
            for turn, compared in enumerate((">=", "<"))
        )
        return (
            f"SELECT {self._key}, 1 FROM ({' UNION ALL '.join(parts)}) parts"
            f" ORDER BY turn LIMIT {self._sample:d}",
            # Draw a fraction below 0.99. With a fraction near 1, rounding could lead beyond the
            # last primary key.
            [random.random() * 0.99] * 2,
        )

    def read_several(self, wrapper: Any, shards: Sequence[Shard]) -> list[tuple[Shard, Any, int]]:
        """Read the shard keys of the rows on ``shards`` by one statement.

        Return tuples (shard, shard key, number of rows).
        """
        parts: list[str] = []
        params: list[Any] = []
        for index, shard in enumerate(shards):
            schema = wrapper.ops.quote_name(shard.schema).replace("%", "%%")
            sql, part_params = self._select(schema)
            parts.append(f"(SELECT {index}, k.* FROM ({sql}) k)")
            params += part_params
        with wrapper.wrap_database_errors, wrapper.node_cursor() as raw:
            cursor = wrapper.make_cursor(raw)
            cursor.execute(" UNION ALL ".join(parts), params)
            rows = cursor.fetchall()
        keys = self._to_keys(row[1] for row in rows)
        return [(shards[row[0]], key, row[2]) for row, key in zip(rows, keys, strict=True)]

    def read_one(self, wrapper: Any, shard: Shard) -> Iterator[tuple[Shard, Any, int]]:
        """Stream the shard keys of the rows on ``shard`` from the server.

        Yield tuples (shard, shard key, number of rows).
        """
        if wrapper.features.can_union_shards:
            sql, params = self._select(wrapper.ops.quote_name(shard.schema).replace("%", "%%"))
            with wrapper.wrap_database_errors, wrapper.node_cursor(stream=True) as raw:
                yield from self._fetch(wrapper.make_cursor(raw), sql, params, shard)
            return
        own: Any = connections[shard.alias]
        assert isinstance(own, ShardConnectionMixin)
        try:
            sql, params = self._select(None)
            with own.cursor() as cursor:
                yield from self._fetch(cursor, sql, params, shard)
        finally:
            own.close()

    def _fetch(
        self, cursor: Any, sql: str, params: list[Any], shard: Shard
    ) -> Iterator[tuple[Shard, Any, int]]:
        cursor.execute(sql, params)
        while rows := cursor.fetchmany(2000):
            keys = self._to_keys(row[0] for row in rows)
            yield from ((shard, key, row[1]) for row, key in zip(rows, keys, strict=True))

    def _to_keys(self, values: Iterable[Any]) -> Iterator[Any]:
        """Convert values from the database to shard keys of the type that strategies expect."""
        rows: Iterable[Any] = ([value] for value in values)
        if self._converters:
            rows = self._compiler.apply_converters(rows, self._converters)
        return (self._field.get_prep_value(row[0]) for row in rows)


def _key_field(options: ShardOptions) -> Field[Any, Any]:
    assert options.key is not None
    return options.key


def _homes(group: str, keys: set[Any]) -> dict[Any, int | None]:
    """Return a dict that maps each key to its shard number, or to None if the key has no shard."""
    strategy = runtime.strategy(group)
    try:
        return strategy.locate_many(keys)
    except InvalidShardKey:
        pass
    homes: dict[Any, int | None] = {}
    for key in keys:
        try:
            homes[key] = strategy.locate(key)
        except InvalidShardKey:
            homes[key] = None
    return homes


def _stray_key(group: str, key: Any, home: int | None) -> StrayKey:
    try:
        why = runtime.strategy(group).explain(key)
    except InvalidShardKey as exc:
        why = str(exc)
    exists = home is not None and home in runtime.group(group)
    return StrayKey(
        key, runtime.shard(group, home).alias if exists and home is not None else None, why
    )
