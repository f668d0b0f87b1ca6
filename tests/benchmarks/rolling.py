"""Times what writers notice of a new column: ``migrate_shards --rolling`` against ``migrate_shards``.

:func:`rolling` starts two servers that replicate from each other, with a large table in one shard. Eight
threads write rows of it with the columns of the old release, each statement on the side that takes
writes. MariaDB adds a column to most tables at once, whatever their size. It rebuilds a table with a
``FULLTEXT`` index, and locks it against writes meanwhile, so the large table has one.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import MySQLdb

from tests.benchmarks.moves import milliseconds
from tests.benchmarks.report import Line
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds
from tests.integration.pairs.site import RollingSite
from tests.services.replication import APPLICATION, LoggingServer, MasterPair, execute, master_pair
from tests.services.server import HOST

ROWS = 2_000_000
WRITERS = 8
_ALBUM = "photos_00000.albums_album"
_REFUSED = 1644  # the refusal of a fence
# Seconds between two statements of a writer. Replication has one thread, and is to keep up with eight.
_PAUSE = 0.002
# A column has no default, which Django drops as soon as it has added the column.
_NO_DEFAULT = 1364
#: The number of shards, half of them active on each server. All but one are empty.
SHARDS = 256


def rolling(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Add a column to a table of a pair in both ways."""
    rows, shards = rounds.of(ROWS), rounds.of(SHARDS)
    with tempfile.TemporaryDirectory() as folder, master_pair() as pair:
        ours = _measure(pair, Path(folder) / "ours", rows, shards, "--rolling")
        plain = _measure(pair, Path(folder) / "plain", rows, shards)
    ratio = ours.worst / plain.worst
    yield Line(
        f"longest statement of a writer while AddField rebuilds a table of {rows:,} rows with a FULLTEXT"
        f" index, on a pair; {shards} shards, {WRITERS} writers",
        "migrate_shards",
        f"{ratio:.3f}x",
        "<= 0.1x",
        ratio <= 0.1,
        f"{milliseconds(ours.worst)} against {milliseconds(plain.worst)}; {ours.failed} statements of the old"
        f" release fail against {plain.failed}; {ours.seconds:.0f} s in all against {plain.seconds:.0f} s",
    )


@dataclass(frozen=True)
class _Measured:
    """:param worst: the seconds of the longest statement of a writer.
    :param failed: the number of statements that failed because a column has no default.
    :param seconds: those of the command.
    """

    worst: float
    failed: int
    seconds: float


def _groups(shards: int) -> dict[str, Any]:
    half = shards // 2
    ranges = [
        {"range": [first, last], "pair": ["db1", "db2"], "active": active}
        for first, last, active in ((0, half - 1, "db1"), (half, shards - 1, "db2"))
    ]
    return {"photos": {"STRATEGY": "modulo", "RANGES": ranges}}


def _measure(pair: MasterPair, folder: Path, rows: int, shards: int, *options: str) -> _Measured:
    """Add the column while writers write."""
    folder.mkdir()
    site = RollingSite(pair, folder, groups=_groups(shards))
    site.create_databases()
    execute(pair.first, f"ALTER TABLE {_ALBUM} ADD FULLTEXT INDEX album_by_title (title)")
    # Words of one letter are not indexed, so that the time goes into the rows.
    execute(
        pair.first,
        f"INSERT INTO {_ALBUM} SELECT seq, 0, 'x x x x x x x x x x' FROM photos_00000.seq_1_to_{rows}",
    )
    pair.settle()
    writers = [_Writer(pair, rows + number) for number in range(1, WRITERS + 1)]
    for writer in writers:
        writer.start()
    began = time.monotonic()
    try:
        done = site.manage("migrate_shards", "albums", "0002", *options)
        seconds = time.monotonic() - began
    finally:
        for writer in writers:
            writer.stopped.set()
        for writer in writers:
            writer.join()
    assert done.code == 0, done.err
    pair.settle()
    worst = max(writer.worst for writer in writers)
    return _Measured(worst, sum(writer.failed for writer in writers), seconds)


class _Writer(threading.Thread):
    """Inserts rows with the columns of the old release, on the side that takes them.

    A statement that waits for a switch is repeated on the other side; its time is that of both.
    """

    def __init__(self, pair: MasterPair, first: int) -> None:
        super().__init__(daemon=True)
        self._sides = [_connect(server) for server in (pair.first, pair.second)]
        self._first = first
        self.stopped = threading.Event()
        self.worst = 0.0
        self.failed = 0

    def run(self) -> None:
        number = self._first
        while not self.stopped.is_set():
            began = time.monotonic()
            while not self._insert(number):
                self._sides.reverse()
            self.worst = max(self.worst, time.monotonic() - began)
            number += WRITERS
            self.stopped.wait(_PAUSE)
        for connection in self._sides:
            connection.close()

    def _insert(self, number: int) -> bool:
        """Return False if the other side takes the writes."""
        with contextlib.closing(self._sides[0].cursor()) as cursor:
            try:
                cursor.execute(
                    f"INSERT INTO {_ALBUM} (album_id, user_id, title) VALUES (%s, 0, 'old')",
                    (number,),
                )
            except MySQLdb.Error as exc:
                if exc.args[0] == _REFUSED:
                    return False
                if exc.args[0] != _NO_DEFAULT:
                    raise
                self.failed += 1
        return True


def _connect(server: LoggingServer) -> Any:
    return MySQLdb.connect(
        host=HOST, port=server.port, user=APPLICATION[0], passwd=APPLICATION[1], autocommit=True
    )
