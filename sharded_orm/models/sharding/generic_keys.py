"""Checks the generic foreign keys of new rows, because no database has a constraint for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_references(alias: str, rows: Sequence[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if a new row refers to a row that the shard ``alias`` lacks.

    Only generic foreign keys of the new rows are checked. If an instance was assigned to the field,
    the check costs no query.
    """
    for field in rows[0]._meta.private_fields if rows else ():
        if (check := getattr(field, "check_references", None)) is not None:
            check(alias, rows)
