"""Whether shards of a group are being moved, as the journal knows it."""

from __future__ import annotations

from typing import Final

from django.db import DatabaseError

from sharded_orm.operations.runs import lease as leases

#: The kind of the runs in the journal.
KIND: Final = "move shards"


def are_moving(group: str) -> bool:
    """Whether a move of shards of ``group`` is under way, or was broken off. One query.

    False if the journal does not answer.
    """
    try:
        return leases.runs().filter(kind=KIND, subject=group, unfinished=True).exists()
    except DatabaseError:
        return False
