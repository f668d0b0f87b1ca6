"""Copy the rows of a shard key between PostgreSQL servers. To compare the copies, each server
computes digests of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.move_locks import of_copier, of_fence
from sharded_orm.backends.postgresql.capture_triggers import PASSES
from sharded_orm.backends.postgresql.move_locks import capture_lock, creation, take_for_good
from sharded_orm.backends.postgresql.stock_session import begin_session
from sharded_orm.backends.row_access import CopiedColumn, RowDigests
from sharded_orm.backends.row_copy import COPY, DELETED, SIDE_PREFIX, RowCopy

# Seconds to wait for another session that changes the rows of the same move.
_PATIENCE: Final = 50
# To skip at most this many numbers of a sequence, call nextval() for each. To skip more, call
# setval(), which is safe only if other sessions take fewer numbers than it skips before it runs.
_TAKEN: Final = 1000
_RELATION: Final = "%s::pg_catalog.regclass"


class PostgreSQLRowCopy(RowCopy):
    """Copies rows on PostgreSQL.

    Values are read and written as text made by the server, in a form that means the same on every
    server. Deferrable foreign keys are checked only at the end of the transaction.
    """

    # With this clause, INSERT may also set columns that are GENERATED ALWAYS AS IDENTITY.
    _as_given = " OVERRIDING SYSTEM VALUE"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._schema = begin_session(connection)

    def claim(self, number: int) -> None:
        take_for_good(self._rows, self._schema, of_copier(number))

    def report_counts(self) -> None:
        # A session reports up to ten seconds later how many rows it has written. ANALYZE, which
        # runs next, counts the rows in the table itself. If the report came after that, the server
        # would add the same rows again. So make the session report now. Servers before version 15
        # have no such function.
        if self._connection.pg_version >= 150000:
            self._rows("SELECT pg_catalog.pg_stat_force_next_flush()")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with super()._transaction():
            self._rows("SET CONSTRAINTS ALL DEFERRED")
            yield

    @contextmanager
    def _passing(self, number: int) -> Iterator[None]:
        fence = f"SELECT 1 FROM {self._quote(FENCES)} WHERE id = %s AND state = 'closed' FOR SHARE"
        alone = capture_lock(
            self._rows,
            self._schema,
            of_fence(number),
            _PATIENCE,
            "changed the rows of the same move",
        )
        with alone, self._transaction():
            if not self._rows(fence, number):
                raise self._not_closed(number)
            # Because of this setting, the triggers accept the changes of this transaction. No
            # writer waits for this transaction, because the fence is closed, and so all other
            # writes of the key are refused at once.
            self._rows("SELECT pg_catalog.set_config(%s, '1', true)", PASSES)
            yield

    def _read_columns(self, table: str) -> Iterator[CopiedColumn]:
        rows = self._rows(
            "SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), l.collname"
            " FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_collation l"
            f" ON l.oid = a.attcollation WHERE a.attrelid = {_RELATION} AND a.attnum > 0"
            " AND NOT a.attisdropped AND a.attgenerated = ''",
            self._quote(table),
        )
        for name, kind, collation in rows:
            yield CopiedColumn(str(name), str(kind), collation=str(collation or ""))

    # ##### Side tables, which collect the copied rows #####

    def prepare(self, tables: Iterable[CapturedTable]) -> None:
        present = set(self._side_tables())
        missing = [table for table in tables if self._side(table).strip('"') not in present]
        if missing:
            with creation(self._rows, self._schema):
                super().prepare(missing)

    def _side_tables(self) -> list[str]:
        rows = self._rows(
            "SELECT relname FROM pg_catalog.pg_class WHERE relkind = 'r' AND relnamespace ="
            " (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)"
            " AND pg_catalog.starts_with(relname::text, %s) ORDER BY relname",
            self._schema,
            SIDE_PREFIX,
        )
        return [str(name) for (name,) in rows]

    def _side_statements(self, table: CapturedTable) -> Iterator[str]:
        copy, side = self._quote(COPY), self._side(table)
        yield (
            f"CREATE TABLE IF NOT EXISTS {side} AS SELECT 0::bigint AS {copy},"
            f" {self._names(self.columns(table))} FROM {self._quote(table.name)} WITH NO DATA"
        )
        index = self._quote(side.strip('"') + "_pk")
        pks = ", ".join(map(self._quote, table.pks))
        yield f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {side} ({copy}, {pks})"

    def _delete_batch(self, side: str, number: int) -> int:
        rows = f"SELECT ctid FROM {side} WHERE {self._quote(COPY)} = %s LIMIT {DELETED:d}"
        return self._count_changed(f"DELETE FROM {side} WHERE ctid = ANY(ARRAY({rows}))", number)

    # ##### The tables of the models #####

    def cascading(self, tables: Iterable[CapturedTable]) -> set[str]:
        # On PostgreSQL, a change by CASCADE calls the triggers like any other change, so a move
        # notices all changes.
        return set()

    def may_publish_early(self, table: CapturedTable) -> bool:
        # If a row changes after it was published early, it is deleted and inserted again. At the
        # deletion, a foreign key with an action such as CASCADE would change other rows, and a
        # foreign key that is not deferrable would raise an error. So return False if the table has
        # such a foreign key, or if one leads to it.
        ((has_actions,),) = self._rows(
            "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_constraint WHERE contype = 'f'"
            f" AND {_RELATION} IN (conrelid, confrelid)"
            " AND (confdeltype <> 'a' OR confupdtype <> 'a' OR NOT condeferrable))",
            self._quote(table.name),
        )
        return not has_actions and super().may_publish_early(table)

    def _unique_columns(self, table: str) -> Iterator[tuple[str, ...]]:
        rows = self._rows(
            "SELECT ARRAY(SELECT a.attname::text FROM pg_catalog.unnest(i.indkey::int2[])"
            " WITH ORDINALITY k (number, place) JOIN pg_catalog.pg_attribute a"
            " ON a.attrelid = i.indrelid AND a.attnum = k.number"
            " WHERE k.place <= i.indnkeyatts ORDER BY k.place) FROM pg_catalog.pg_index i"
            f" WHERE i.indrelid = {_RELATION} AND i.indisunique AND i.indpred IS NULL"
            " AND i.indexprs IS NULL ORDER BY i.indexrelid",
            self._quote(table),
        )
        for (names,) in rows:
            yield tuple(map(str, names))

    def _advance_counters(self, table: CapturedTable, number: int) -> None:
        for name, sequence in self._counted_columns(table):
            if table.fresh_ids and name in table.pks:
                continue
            # Leave out numbers above the maximum of the sequence, which the sequence never returns.
            ((largest,),) = self._rows(
                f"SELECT max({self._quote(name)}) FROM {self._side(table)} WHERE"
                f" {self._quote(COPY)} = %s AND {self._quote(name)} <= (SELECT seqmax"
                f" FROM pg_catalog.pg_sequence WHERE seqrelid = {_RELATION})",
                number,
                sequence,
            )
            if largest is not None:
                self._advance(sequence, int(largest))

    def _counted_columns(self, table: CapturedTable) -> list[tuple[str, str]]:
        """Return the columns that get their numbers from a sequence, as pairs (column, SQL name of
        the sequence).
        """
        rows = self._rows(
            "SELECT a.attname, d.objid::pg_catalog.regclass::text FROM pg_catalog.pg_attribute a"
            " JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::regclass"
            " AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum"
            " AND d.classid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('a', 'i')"
            " JOIN pg_catalog.pg_sequence s ON s.seqrelid = d.objid"
            " LEFT JOIN pg_catalog.pg_attrdef e ON e.adrelid = a.attrelid AND e.adnum = a.attnum"
            f" WHERE a.attrelid = {_RELATION} AND (a.attidentity <> '' OR"
            # The default must be exactly nextval(…). With any other expression, the column's value
            # may differ from the number that the sequence has returned.
            " pg_catalog.pg_get_expr(e.adbin, e.adrelid) ="
            " 'nextval(' || pg_catalog.quote_literal(d.objid::regclass::text) || '::regclass)')"
            " AND a.attnum > 0 AND NOT a.attisdropped AND s.seqincrement > 0",
            self._quote(table.name),
        )
        return [(str(name), str(sequence)) for name, sequence in rows]

    def _advance(self, sequence: str, largest: int) -> None:
        """Make a sequence return only numbers above ``largest`` from now on.

        Other sessions may take numbers from it at the same time.
        """
        ((last, is_called, increment),) = self._rows(
            f"SELECT q.last_value, q.is_called, s.seqincrement FROM {sequence} q,"
            f" pg_catalog.pg_sequence s WHERE s.seqrelid = {_RELATION}",
            sequence,
        )
        if largest < last:
            return
        missing = -((last - largest) // increment)
        # If other sessions take more than ``missing`` numbers before setval() is executed, setval()
        # sets the sequence back, and the sequence returns numbers twice. So do not call setval() if
        # ``missing`` is small, but take the missing numbers one by one.
        if missing > _TAKEN:
            last += missing * increment
            self._rows(f"SELECT pg_catalog.setval({_RELATION}, %s)", sequence, last)
        elif taken := missing + (not is_called):
            self._rows(
                f"SELECT count(pg_catalog.nextval({_RELATION}))"
                " FROM pg_catalog.generate_series(1, %s)",
                sequence,
                taken,
            )

    # ##### Values #####

    def _exact(self, column: CopiedColumn) -> str:
        name = self._quote(column.name)
        if column.kind.startswith("character(") or column.kind == "bpchar":
            # For character(n), call these functions rather than cast to text: a cast would remove
            # the trailing blanks.
            return f"pg_catalog.textin(pg_catalog.bpcharout({name}))"
        return f"{name}::text"

    def _mark(self, column: CopiedColumn) -> str:
        return "%s"

    def _key_condition(self, column: str) -> str:
        # The first comparison can use an index. But the column's collation may treat two different
        # keys as equal. So the second comparison uses the collation "C", which compares bytes.
        return f'({column} = %s AND {column}::text COLLATE "C" = %s)'

    def _key_params(self, key: Any) -> list[Any]:
        return [str(key), str(key)]

    def _row_digest(self, table: CapturedTable) -> str:
        # The text of a ROW marks where each value ends, and shows NULL and '' differently. So
        # different rows have different texts, and different digests.
        row = f"ROW({self._names(self._kept_columns(table))})::text"
        return f"pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to({row}, 'UTF8')), 'hex')"

    def _digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> RowDigests:
        halves = ", ".join(
            f"coalesce(sum(('x' || pg_catalog.substr(d, {start}, 16))::bit(64)::bigint), 0)"
            for start in (1, 17)
        )
        ((count, one, two),) = self._rows(
            f"SELECT count(*), {halves} FROM (SELECT {self._row_digest(table)} d FROM {source}"
            f" WHERE {condition}) digests",
            *params,
        )
        return RowDigests(int(count), f"{one} {two}")
