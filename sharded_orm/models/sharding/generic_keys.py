"""Checks the generic foreign keys of new rows, because no database has a constraint for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_references(alias: str, rows: Sequence[Any]) -> None:
    """Check the generic foreign keys of new rows that are stored on the shard ``alias``.

    If a new row refers to a row of the same group, that row must be on the same shard, under the
    same shard key. If an instance was assigned to the generic foreign key, the check costs no
    query. If only an id was set, a query looks for the row.

    :param rows: new rows, all of one model.
    :raises CrossShardRelation: such a row is not on the shard, or has another shard key.
    """
    for field in rows[0]._meta.private_fields if rows else ():
        if (check := getattr(field, "check_references", None)) is not None:
            check(alias, rows)
