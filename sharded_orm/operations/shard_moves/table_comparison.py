"""Compare a shard's tables on two servers, to check the copy that a move has made.

The comparison shares no code with the copying, so that it also finds errors of the copying code.
Each server computes a digest (a hash) of a range of rows. If the two digests differ, each server
computes a digest of each row in the range.

A row that differs is *open*: it is compared again later, because the site may just have changed it.
A row that was copied again is open, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.row_access import Row, RowAccess

#: The number of rows in a range. A server computes one digest (a hash) for each range of rows.
CHUNK: Final = 5000
#: The largest number of rows per table that a message names.
NAMED: Final = 5

_Pks = dict[Row, None]


class TableComparison:
    """Compares the tables of a shard that moves. Used by one thread.

    A row is *open* if it must be compared again: it differed, or was copied again.

    :param here: maps the usual name of each table to a description of the table on the source. The
        description has the table's present name, because the move renames tables for some time.
        The caller updates this dict when the move renames a table.
    :param there: the same for the tables on the target.
    """

    def __init__(
        self,
        source: RowAccess,
        target: RowAccess,
        here: Mapping[str, CapturedTable],
        there: Mapping[str, CapturedTable],
    ) -> None:
        self._source, self._target = source, target
        self._here, self._there = here, there
        self._open: dict[str, _Pks] = {name: {} for name in here}

    def compare_all(self, names: Iterable[str], proceed: Callable[[], None]) -> None:
        """Compare whole tables. Rows that differ become open.

        Costs one or two statements per server for each range of 5,000 rows. Both servers compute
        the digest of a range at the same time.

        :param names: the names of the tables.
        :param proceed: called before each range. It raises an error to stop the comparison.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="sharded_orm comparison") as thread:
            for name in names:
                for after, until in self._ranges(name, proceed):
                    there = thread.submit(
                        self._target.range_digests, self._there[name], after, until
                    )
                    here = self._source.range_digests(self._here[name], after, until)
                    if here != there.result():
                        self._open_differing(
                            name,
                            self._source.range_rows(self._here[name], after, until),
                            self._target.range_rows(self._there[name], after, until),
                        )

    def _ranges(self, name: str, proceed: Callable[[], None]) -> Iterator[tuple[Row, Row]]:
        after: Row = ()
        while True:
            proceed()
            until = self._source.boundary(self._here[name], after, CHUNK)
            yield after, until
            if not until:
                return
            after = until

    def _open_differing(self, name: str, here: dict[Row, str], there: dict[Row, str]) -> None:
        for pk in here.keys() | there.keys():
            if here.get(pk) != there.get(pk):
                self._open[name][pk] = None

    def note_changed(self, name: str, pks: Iterable[Row]) -> None:
        """Mark rows as open: they were copied again, so the new copy must be compared."""
        self._open[name].update(dict.fromkeys(pks))

    def compare_open(self) -> int:
        """Compare the open rows once more. Rows that are equal now are no longer open.

        Return the number of rows that are still open.
        """
        for name, pks in self._open.items():
            if pks:
                self._open[name] = {}
                self._open_differing(
                    name,
                    self._source.rows_of(self._here[name], pks),
                    self._target.rows_of(self._there[name], pks),
                )
        return sum(map(len, self._open.values()))

    @property
    def open_pks(self) -> dict[str, list[Row]]:
        """Maps the name of each table with open rows to the primary keys of these rows."""
        return {name: list(pks) for name, pks in self._open.items() if pks}

    def problems(self) -> list[str]:
        """Return a sentence for each table that has open rows. Call this after compare_open()."""
        return [
            f"{name}: {len(pks)} rows differ (such as"
            f" {', '.join(', '.join(map(_text, pk)) for pk in sorted(pks, key=repr)[:NAMED])})"
            for name, pks in self._open.items()
            if pks
        ]


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
