"""Read all rows, or a sample of the rows, from a table of each shard."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.db import DatabaseError, connections
from django.db.models import BigIntegerField, Field, IntegerField, Model

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.models.sharding.options import target_field
from sharded_orm.operations.shards.status import error_line
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

#: Number of shards that one statement reads. On SQLite, a statement reads only one shard, because
#: each shard is a separate file.
BATCH = 256
_BIG_INTEGER: Any = BigIntegerField()

Sql = tuple[str, list[Any]]
#: A function that returns a SELECT for one shard, and its parameters. It gets the SQL that must be
#: put before the name of each table, such as "`photos_00042`.".
SqlOfShard = Callable[[str], Sql]


class TableRows:
    """Makes SQL that reads all rows of a model's table, or a sample of them.

    The tables of parent models are not read.

    :param wrapper: a connection object of any shard of the group, for quoting names.
    :param sample: number of rows, in the order of the primary key; None for all rows. If the
        primary key is an integer, the sample begins at a random row; otherwise at the first row.
    """

    def __init__(self, model: type[Model], wrapper: Any, sample: int | None) -> None:
        self._sample = sample
        self._quote = wrapper.ops.quote_name
        self._table = self._quote(model._meta.db_table)
        pks = model._meta.pk_fields
        self._pks = [self._quote(pk.column) for pk in pks]
        # The SQL type of big integers, if the primary key is an integer. Otherwise None: then
        # samples begin at the first row, because no random key can be computed.
        number = len(pks) == 1 and isinstance(target_field(pks[0]), IntegerField)
        self._number = _BIG_INTEGER.cast_db_type(wrapper) if number else None

    def source(self, prefix: str, fields: Iterable[Field[Any, Any]]) -> Sql:
        """Return the SQL that a statement can have after FROM, and the parameters of this SQL.

        It is the table's name, or a subquery that reads a sample.

        :param prefix: SQL that is put before the table's name, such as "`photos_00042`.".
        :param fields: the fields that the statement reads.
        """
        table = f"{prefix}{self._table}"
        if self._sample is None:
            return table, []
        names = ", ".join(dict.fromkeys(self._quote(field.column) for field in fields))
        limit = f"ORDER BY {', '.join(self._pks)} LIMIT {self._sample:d}"
        if self._number is None:
            return f"(SELECT {names} FROM {table} {limit})", []
        (pk,) = self._pks
        start = f"(SELECT MIN({pk}) + CAST(%s * (MAX({pk}) - MIN({pk})) AS {self._number}) FROM {table})"
        # Read rows from a random primary key on. If too few rows follow it, read the missing ones
        # from the beginning of the table.
        parts = (
            f"SELECT * FROM (SELECT {names}, {turn} sharded_orm_turn FROM {table}"
            f" WHERE {pk} {compared} {start} {limit}) part{turn}"
            for turn, compared in enumerate((">=", "<"))
        )
        return (
            f"(SELECT {names} FROM ({' UNION ALL '.join(parts)}) parts"
            f" ORDER BY sharded_orm_turn LIMIT {self._sample:d})",
            # Both parts get the same random fraction, which says where the sample begins: 0 means
            # the smallest primary key, 1 the largest. It is below 0.99, because a fraction near 1
            # could be rounded to a key above the largest.
            [random.random() * 0.99] * 2,
        )

    def value_counts(self, field: Field[Any, Any]) -> SqlOfShard:
        """Return the SQL for the distinct values of ``field``, each with its number of rows."""

        def sql_of(prefix: str) -> Sql:
            source, params = self.source(prefix, [field])
            column = self._quote(field.column)
            return f"SELECT {column}, COUNT(*) FROM {source} counted GROUP BY {column}", params

        return sql_of


class TableRead:
    """Reads rows from many shards with the same statement.

    :param wrapper: a connection object of any shard of the group.
    :param fields: the fields that the statement selects as its first columns. Their values are
        converted as in a query of Django. If the statement selects more columns, such as a count,
        their values are returned as they come from the driver.
    :param sql: a function that returns the statement for a shard.
    """

    def __init__(
        self, wrapper: Any, model: type[Model], fields: Sequence[Field[Any, Any]], sql: SqlOfShard
    ) -> None:
        self._sql = sql
        self._compiler = model._base_manager.none().query.get_compiler(connection=wrapper)
        columns: list[Any] = [field.get_col(field.model._meta.db_table) for field in fields]
        self._converters = self._compiler.get_converters(columns)

    def rows(
        self, wrapper: Any, shards: Sequence[Shard], errors: dict[str, str], *, together: bool
    ) -> Iterator[tuple[Shard, list[Any]]]:
        """Yield the rows on ``shards``, each with its shard.

        :param wrapper: a connection object of the node that has ``shards``.
        :param errors: a dict. If a shard cannot be read, its alias is added with the reason.
        :param together: whether to read 256 shards with one statement, if the database can. Pass
            False if there may be many rows: then each shard has its own statement, and its rows are
            streamed.
        :raises DatabaseError: the node does not answer.
        """
        if together and wrapper.features.can_union_shards:
            for start in range(0, len(shards), BATCH):
                yield from self._read_union(wrapper, shards[start : start + BATCH], errors)
            return
        for shard in shards:
            try:
                yield from self._read_one(wrapper, shard)
            except DatabaseError as exc:
                _note_failure(shard, exc, errors)

    def _read_union(
        self, wrapper: Any, shards: Sequence[Shard], errors: dict[str, str]
    ) -> list[tuple[Shard, list[Any]]]:
        try:
            return self._read_several(wrapper, shards)
        except DatabaseError as exc:
            if len(shards) == 1 or is_node_gone(exc):
                _note_failure(shards[0], exc, errors)
                return []
        # The statement fails for all shards if one of them cannot be read, for example because it
        # lacks the table. To find this shard and to read the others, read each half separately.
        middle = len(shards) // 2
        return [
            *self._read_union(wrapper, shards[:middle], errors),
            *self._read_union(wrapper, shards[middle:], errors),
        ]

    def _read_several(self, wrapper: Any, shards: Sequence[Shard]) -> list[tuple[Shard, list[Any]]]:
        parts: list[str] = []
        params: list[Any] = []
        for index, shard in enumerate(shards):
            sql, part_params = self._sql(_prefix(wrapper, shard))
            parts.append(f"(SELECT {index}, k.* FROM ({sql}) k)")
            params += part_params
        with wrapper.wrap_database_errors, wrapper.node_cursor() as raw:
            cursor = wrapper.make_cursor(raw)
            cursor.execute(" UNION ALL ".join(parts), params)
            rows = cursor.fetchall()
        converted = self._convert(row[1:] for row in rows)
        return [(shards[row[0]], values) for row, values in zip(rows, converted, strict=True)]

    def _read_one(self, wrapper: Any, shard: Shard) -> Iterator[tuple[Shard, list[Any]]]:
        if wrapper.features.can_union_shards:
            with wrapper.wrap_database_errors, wrapper.node_cursor(stream=True) as raw:
                yield from self._fetch(wrapper.make_cursor(raw), shard, _prefix(wrapper, shard))
            return
        own: Any = connections[shard.alias]
        assert isinstance(own, ShardConnectionMixin)
        try:
            with own.cursor() as cursor:
                yield from self._fetch(cursor, shard, "")
        finally:
            own.close()

    def _fetch(self, cursor: Any, shard: Shard, prefix: str) -> Iterator[tuple[Shard, list[Any]]]:
        cursor.execute(*self._sql(prefix))
        while rows := cursor.fetchmany(2000):
            yield from ((shard, values) for values in self._convert(rows))

    def _convert(self, rows: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        converted: Iterable[Any] = map(list, rows)
        if self._converters:
            converted = self._compiler.apply_converters(converted, self._converters)
        yield from converted


def _prefix(wrapper: Any, shard: Shard) -> str:
    schema: str = wrapper.ops.quote_name(shard.schema)
    return schema.replace("%", "%%") + "."


def _note_failure(shard: Shard, exc: DatabaseError, errors: dict[str, str]) -> None:
    if is_node_gone(exc):
        raise exc
    errors[shard.alias] = error_line(exc)
