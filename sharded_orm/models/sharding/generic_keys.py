"""Checks the generic foreign keys of new rows, because no database has a constraint for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_references(alias: str, rows: Sequence[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if a generic foreign key refers to a row that must not be
    used.

    The row to which a new row refers must be on the shard ``alias``, under the same shard key. If
    an instance was assigned to the generic foreign key, the check costs no query. If only an id was
    set, a query looks for the row.

    :param rows: new rows, all of one model.
    """
    for field in rows[0]._meta.private_fields if rows else ():
        if (check := getattr(field, "check_references", None)) is not None:
            check(alias, rows)
