"""The comparison of a shard's tables on two servers. It shares no code with the copying of rows.

Each server computes a digest (a hash) of each range of rows, byte by byte. If the digests of a
range differ, each server computes a digest of each of its rows. A row whose digests differ, or that
has changed since, is *open*: it is compared again later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.row_access import Row, RowAccess

#: The number of rows in a range. To compare a range, each server computes one digest of its rows.
CHUNK: Final = 5000
#: The largest number of rows per table that a message names.
NAMED: Final = 5

_Pks = dict[Row, None]


class TableComparison:
    """Compares the tables of a schema that moves. Used by one thread.

    A row that must be compared again later is called *open*.

    :param here: the tables as ``source`` reads them now, by real name. The caller updates this dict
        when it hides (renames) the tables.
    :param there: the tables as ``target`` reads them, by real name.
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
        """Compare whole tables. Rows that differ become open, to be compared again later.

        Costs two statements per server and range of rows. Both servers compute the digests (hashes)
        of the rows of a range at the same time.

        :param names: the names of the tables.
        :param proceed: called before each range. It may raise an error.
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
        """Mark rows as open: they were changed and copied again, so they must be compared later."""
        self._open[name].update(dict.fromkeys(pks))

    def compare_open(self) -> int:
        """Compare the open rows, which differed or were changed, once more.

        Equal rows are no longer open. Return the number of rows that are still open.
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
        """The primary keys of the open rows (to be compared again), in lists keyed by table
        name.
        """
        return {name: list(pks) for name, pks in self._open.items() if pks}

    def problems(self) -> list[str]:
        """Return a sentence for each table that has open rows.

        A row is open if it differs or was not compared yet.
        """
        return [
            f"{name}: {len(pks)} rows differ (such as"
            f" {', '.join(', '.join(map(_text, pk)) for pk in sorted(pks, key=repr)[:NAMED])})"
            for name, pks in self._open.items()
            if pks
        ]


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
