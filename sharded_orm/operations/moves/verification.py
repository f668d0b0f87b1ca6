"""The comparison of a key's rows on two shards. It shares nothing with the copier.

The servers digest the rows of each table, byte by byte. If the digests differ, the servers digest
each row, to name those that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.row_copy import RowCopy

#: The most rows per table that a message names.
NAMED = 5


def differences(
    source: RowCopy, target: RowCopy, tables: Sequence[CapturedTable], key: Any
) -> tuple[int, list[str]]:
    """Compare the rows of a key in the real tables of two shards.

    Return their number, and a sentence for each table that differs. Costs one statement per table
    and shard.
    """
    count, problems = 0, []
    for table in tables:
        here, there = source.key_digests(table, key), target.key_digests(table, key)
        count += here.count
        if here != there:
            problems.append(_difference(source, target, table, key))
    return count, problems


def _difference(source: RowCopy, target: RowCopy, table: CapturedTable, key: Any) -> str:
    here, there = source.key_rows(table, key), target.key_rows(table, key)
    parts = []
    for what, pks in (
        ("only on the source", here.keys() - there.keys()),
        ("only on the target", there.keys() - here.keys()),
        ("with other values", {pk for pk in here.keys() & there.keys() if here[pk] != there[pk]}),
    ):
        if pks:
            names = ", ".join(", ".join(map(str, pk)) for pk in sorted(pks, key=repr)[:NAMED])
            parts.append(f"{len(pks)} rows {what} (such as {names})")
    return f"{table.name}: {'; '.join(parts) or 'the same rows with another digest'}"
