"""Find rows that differ between the sides of a pair, and copy those of one side to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from sharded_orm import database_settings
from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.row_access import Row, batches
from sharded_orm.operations.exceptions import PairRefused

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

# The number of rows of which one digest is made.
_CHUNK: Final = 2000


class RowDifference(NamedTuple):
    """A row that differs between the two sides of a pair.

    Only one of the sides, the survivor, has the right row. The other side is repaired.

    :param row: the row on the side that is repaired, as a dict that maps columns to values; None if
        the row is missing there.
    :param instead: the right row, in the same form; None if the survivor has no such row.
    """

    schema: str
    table: str
    row: dict[str, Any] | None
    instead: dict[str, Any] | None


class SideRows:
    """Compares the rows of both sides of a pair by their primary keys, and repairs one side.

    It is a context manager with sessions on both sides. All rows of the survivor are read as they
    are at the beginning of the block. Nobody else may write to the side that is repaired during the
    block. To be used by one thread.

    :param survivor: the side whose rows are right.
    :param side: the side that gets the rows of the survivor.
    :param check: called before each query. It raises an error if this process must not continue.
    """

    #: The moment at which the rows of the survivor are read, as a position in its log.
    position: str

    def __init__(
        self,
        survivor: MySQLPairSide,
        side: MySQLPairSide,
        schemas: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._tables = [
            (schema, table)
            for schema, tables in survivor.columns(schemas).items()
            for table in tables
        ]
        self._different: dict[tuple[str, str], set[Row]] = {}
        self._stack = ExitStack()
        settings = [
            database_settings.operator_settings(each.name) or {} for each in (survivor, side)
        ]
        self._name = side.name
        self._theirs = self._stack.enter_context(survivor.rows(settings[0]))
        self._own = self._stack.enter_context(side.rows(side.quiet_settings(settings[1])))

    def __enter__(self) -> Self:
        self.position = self._stack.enter_context(self._theirs.snapshot())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def count(self) -> int:
        """The number of rows that differ."""
        return sum(map(len, self._different.values()))

    def compare(self) -> None:
        """Compare all rows. Reads each table on both sides.

        :raises PairRefused: a table has no primary key.
        """
        for schema, name in self._tables:
            table = self._table(schema, name)
            after: Row = ()
            while True:
                self._check()
                until = self._theirs.boundary(table, after, _CHUNK)
                if self._own.range_digests(table, after, until) != self._theirs.range_digests(
                    table, after, until
                ):
                    own, theirs = (
                        access.range_rows(table, after, until)
                        for access in (self._own, self._theirs)
                    )
                    different = {pk for pk, _ in own.items() ^ theirs.items()}
                    self._different.setdefault((schema, name), set()).update(different)
                if not until:
                    break
                after = until

    def _table(self, schema: str, name: str) -> CapturedTable:
        try:
            self._own.table(schema, name)
            return self._theirs.table(schema, name)
        except LookupError as exc:
            raise PairRefused(
                [
                    f"{schema}.{name} has no primary key, so rows that differ cannot be found: make"
                    f" {self._name!r} anew from a copy of the other side. Nothing was changed"
                ]
            ) from exc

    def differences(self) -> Iterator[RowDifference]:
        """Yield the rows that differ. Call :meth:`compare` before."""
        for (schema, name), different in self._different.items():
            table = self._table(schema, name)
            for pks in batches(sorted(different)):
                self._check()
                own, theirs = (a.rows_by_pk(table, pks) for a in (self._own, self._theirs))
                for pk in pks:
                    yield RowDifference(schema, name, own.get(pk), theirs.get(pk))

    def repair(self) -> None:
        """Make the rows that differ equal to those of the survivor. One transaction per table.

        A row that the survivor does not have is deleted on the side that is repaired.
        """
        for (schema, name), different in self._different.items():
            self._check()
            table = self._table(schema, name)
            rows = self._theirs.read_again(table, None, sorted(different))
            self._own.store(table, rows, different)
