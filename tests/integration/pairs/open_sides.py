"""A thread that looks all the time whether both sides of a pair take writes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import MySQLdb

from tests.services.replication import APPLICATION, LoggingServer, MasterPair
from tests.services.server import HOST

ALBUM = "photos_00000.albums_album"


class OpenSides(threading.Thread):
    """Inserts an album on one side in a transaction and, before that ends, on the other side.

    A fence closes only after the transactions that have written. So if both inserts succeed, both sides
    were open at the same moment. All inserts are rolled back.
    """

    def __init__(self, pair: MasterPair) -> None:
        super().__init__(daemon=True)
        self._pair = pair
        self._stopped = threading.Event()
        #: How often no side, one side, and both sides have taken writes.
        self.counts = [0, 0, 0]

    def run(self) -> None:
        connections = [_connect(server) for server in (self._pair.first, self._pair.second)]
        while not self._stopped.is_set():
            self.counts[sum(map(_accepts, connections))] += 1
            for connection in connections:
                connection.rollback()
            connections.reverse()
        for connection in connections:
            connection.close()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@contextlib.contextmanager
def watched_sides(pair: MasterPair) -> Iterator[None]:
    """A context manager in whose block both sides never take writes of shard 0 at the same time."""
    watch = OpenSides(pair)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
    assert watch.counts[1] > 0
    assert watch.counts[2] == 0


def accepts_writes(server: LoggingServer) -> bool:
    """Return whether the application may insert an album on the server. Changes nothing."""
    with contextlib.closing(_connect(server)) as connection:
        return _accepts(connection)


def _accepts(connection: Any) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            cursor.execute(f"INSERT INTO {ALBUM} (album_id, user_id) VALUES (-1, 0)")
        except MySQLdb.MySQLError:
            # A fence refuses the row, or the table is just being made anew.
            return False
    return True


def _connect(server: LoggingServer) -> Any:
    return MySQLdb.connect(
        host=HOST,
        port=server.port,
        user=APPLICATION[0],
        passwd=APPLICATION[1],
        autocommit=True,
        init_command="SET sql_mode = ''",  # the row fits into either schema
    )
