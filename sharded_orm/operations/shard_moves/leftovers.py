"""Find and drop the tables that moves of shards have left on nodes: old tables, which are kept for
a while, and incomplete copies.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import MoveFailed
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.journal import JournalRun, one_line
from sharded_orm.operations.shard_moves import replication
from sharded_orm.operations.shard_moves.shard_mover import remove_capture, remove_copy
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions


def remove_expired(run: JournalRun, *, at_once: bool = False) -> list[str]:
    """Drop old tables that were kept for long enough. Return sentences about them for the operator.

    :param run: the run that moves shards of the group. This process holds it.
    :param at_once: whether to drop all old tables, even those that were not kept for long enough
        yet.
    """
    notes: list[str] = []
    now = run.now()
    for row in leases.runs().filter(kind=run.kind, subject=run.subject).order_by("pk"):
        arguments = run.arguments if row.pk == run.id else row.arguments
        kept = list(arguments.get("left", ()))
        stay = []
        for old in kept:
            if not at_once and datetime.fromisoformat(old["until"]) > now:
                stay.append(old)
                continue
            what = f"the old tables of shard {old['shard']} on {old['node']!r}"
            try:
                was_there = _drop(run, old)
                notes.append(
                    f"{what} were deleted"
                    if was_there
                    else f"no tables of shard {old['shard']} are left on {old['node']!r}"
                )
            except (Error, MoveFailed) as exc:
                why = one_line(exc) if isinstance(exc, Error) else str(exc)
                stay.append(old)
                notes.append(f"{what} were not deleted ({why})")
        if stay == kept:
            continue
        if row.pk == run.id:
            run.note(left=stay)
        else:
            run.note()
            row.arguments = {**arguments, "left": stay}
            row.save(update_fields=["arguments"])
    return notes


def _drop(run: JournalRun, old: dict[str, Any]) -> bool:
    """Drop the old tables of one shard. Return False if there are none.

    :param old: the entry for these tables in the run's arguments: the shard, the node, and the
        number of the move that has left the tables.
    :raises MoveFailed: the tables cannot be dropped at this time.
    :raises django.db.Error: a server has refused to drop the tables.
    """
    if old["node"] not in runtime.topology().nodes:
        raise MoveFailed("the topology has no such node")
    shard = runtime.shard(run.subject, old["shard"])
    if shard.node == old["node"]:
        # No old tables are left: the shard has moved back to this node, and that move has dropped them.
        return False
    replica = old.get("replica")
    if replica is not None and replication.replicates(replica, old["node"]):
        raise MoveFailed(
            f"{replica!r} replicates from there: end that first, by 'shards split --cleanup'"
        )
    with node_connection(old["node"]) as wrapper:
        if shard.schema not in wrapper.schemas_present():
            # The schema does not exist. An earlier process has dropped it, but was killed before it
            # could record this, or the copy of an undone move was removed at once.
            return False
    with SchemaSessions(replace(shard, node=old["node"]), run.note) as sessions:
        if sessions.schema.hidden():
            remove_capture(sessions, old["number"])
        remove_copy(sessions)
    return True
