"""Compare a key's rows on two shards, to find errors of the mover that has copied them.

The comparison shares no code with the mover, because an error in shared code would not be found.
The database servers compute a digest (a hash) of the rows of each table, byte by byte. If the
digests of a table differ, the servers compute a digest of each row, to name the differing rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.row_access import Row, RowDigests
from sharded_orm.backends.row_copy import RowCopy

#: A message names at most this many rows per table.
NAMED = 5


def differences(
    source: RowCopy, target: RowCopy, tables: Sequence[CapturedTable], key: Any
) -> tuple[int, list[str]]:
    """Compare the rows of a key in the real tables of two shards.

    Return the number of rows, and a sentence for each table that differs. Costs one statement per
    table and shard. The two shards work at the same time, because the site's writes to the key wait
    until the comparison ends.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sharded_orm comparison") as thread:
        target_digests = thread.submit(_digests, target, tables, key)
        here, there = _digests(source, tables, key), target_digests.result()
    problems = [
        _difference(source, target, table, key)
        for table, digest, other in zip(tables, here, there, strict=True)
        if digest != other
    ]
    return sum(digest.count for digest in here), problems


def _digests(copy: RowCopy, tables: Sequence[CapturedTable], key: Any) -> list[RowDigests]:
    return [copy.key_digests(table, key) for table in tables]


def row_names(pks: Collection[Row]) -> list[str]:
    """Return texts that name at most :data:`NAMED` rows by their primary keys.

    :param pks: primary keys, as :meth:`RowCopy.key_rows` returns them.
    """
    names = [", ".join(map(_text, pk)) for pk in pks]
    return sorted(names, key=lambda name: (len(name), name))[:NAMED]


def _text(value: object) -> str:
    # Some databases return the text of a primary key as bytes.
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _difference(source: RowCopy, target: RowCopy, table: CapturedTable, key: Any) -> str:
    here, there = source.key_rows(table, key), target.key_rows(table, key)
    parts = []
    for what, pks in (
        ("only on the source", here.keys() - there.keys()),
        ("only on the target", there.keys() - here.keys()),
        ("with other values", {pk for pk in here.keys() & there.keys() if here[pk] != there[pk]}),
    ):
        if pks:
            parts.append(f"{len(pks)} rows {what} (such as {', '.join(row_names(pks))})")
    return f"{table.name}: {'; '.join(parts) or 'the same rows with another digest'}"
