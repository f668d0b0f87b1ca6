"""Deadlocks on a shard on MariaDB: the server rolls back the transaction that has written less."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.unit.backends.group.conftest import Shards

#: The values in the table of a shard that :func:`fill` has filled.
ROWS = list(range(100, 141))


def fill(shards: Shards, number: int) -> None:
    for value in ROWS:
        shards.add(number, value)


@contextmanager
def deadlock(shards: Shards, number: int) -> Iterator[str]:
    """Yield a statement that becomes the victim of a deadlock on a shard that :func:`fill` has filled.

    The block's transaction must have locked row 100, and must have written fewer than 20 rows.
    """
    other = shards[number].copy()
    other.inc_thread_sharing()
    other.set_autocommit(False)

    def wait() -> None:
        with other.cursor() as cursor:
            cursor.execute("UPDATE thing SET value = value + 1000 WHERE value = 100")

    with other.cursor() as cursor:
        cursor.execute("UPDATE thing SET value = value + 1000 WHERE value > 110")
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with shards[number].node_cursor() as cursor:
            while True:
                cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
                if cursor.fetchone()[1] != "0":
                    break
        yield "UPDATE thing SET value = -1 WHERE value = 140"
    finally:
        thread.join()
        other.rollback()
        other.close()
