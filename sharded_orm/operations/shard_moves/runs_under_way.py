"""Query the journal whether shards or keys of a group are being moved.

A process asks this after a deadlock, or when a statement has found no table, because a move may be
the cause.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.db import DatabaseError
from django.db.models import Q
from django.utils import timezone

from sharded_orm.operations import moves, pairs
from sharded_orm.operations.runs import lease as leases

#: The kind of operation under which the journal stores moves of shards.
KIND: Final = "move shards"
# A move counts as under way for this time after its end. A process asks after an error whether a
# move may have caused it. Between the error and the question, the move may have ended.
_RECENT: Final = timedelta(minutes=1)


def are_moving(group: str) -> bool:
    """Return whether shards or keys of ``group`` are being moved, or were in the last minute.

    A change of the active side of a pair counts as a move. A move that was interrupted counts until
    somebody has ended it with ``--repair``. Returns False if the journal does not answer. One
    query.
    """
    is_recent = Q(unfinished=True) | Q(finished_at__gte=timezone.now() - _RECENT)
    runs = leases.runs().filter(is_recent, kind__in=[KIND, moves.KIND, pairs.KIND], subject=group)
    try:
        return runs.exists()
    except DatabaseError:
        return False
