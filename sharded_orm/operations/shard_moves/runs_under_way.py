"""Query the journal, which records long operations, for unfinished moves of a group's shards or
keys.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.db import DatabaseError
from django.db.models import Q
from django.utils import timezone

from sharded_orm.operations import moves, pairs
from sharded_orm.operations.runs import lease as leases

#: The kind under which the journal stores the runs that move shards.
KIND: Final = "move shards"
# For how long an ended move still counts as under way, for a process that checks whether a move may
# have caused its deadlock. It may be paused before the check, but hardly for longer than this.
_RECENT: Final = timedelta(minutes=1)


def are_moving(group: str) -> bool:
    """Return whether shards or keys of ``group`` are being moved, or were in the last minute.

    A change of the active side of a pair counts as a move. A move that was broken off counts until
    it is repaired. Returns False if the journal does not answer. One query.
    """
    is_recent = Q(unfinished=True) | Q(finished_at__gte=timezone.now() - _RECENT)
    runs = leases.runs().filter(is_recent, kind__in=[KIND, moves.KIND, pairs.KIND], subject=group)
    try:
        return runs.exists()
    except DatabaseError:
        return False
