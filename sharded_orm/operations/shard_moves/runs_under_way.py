"""Whether rows of a group are being moved, as the journal knows it."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.db import DatabaseError
from django.db.models import Q
from django.utils import timezone

from sharded_orm.operations import moves
from sharded_orm.operations.runs import lease as leases

#: The kind of the runs in the journal.
KIND: Final = "move shards"
# The longest time between a deadlock and this question: the process may have been paused.
_RECENT: Final = timedelta(minutes=1)


def are_moving(group: str) -> bool:
    """Whether shards or keys of ``group`` are being moved, or were in the last minute. One query.

    So it is while a move that was broken off waits for its repair. False if the journal does not
    answer.
    """
    is_recent = Q(unfinished=True) | Q(finished_at__gte=timezone.now() - _RECENT)
    runs = leases.runs().filter(is_recent, kind__in=[KIND, moves.KIND], subject=group)
    try:
        return runs.exists()
    except DatabaseError:
        return False
