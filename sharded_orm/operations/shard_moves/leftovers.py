"""Drop the tables that moves of shards have left on nodes.

After a move, the old node keeps the old tables for a while, for example for a day. A move that was
undone may leave an incomplete copy on the new node.
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
    """Drop the tables that earlier moves have left, if the time for which they are kept is over.

    Return sentences for the operator: what was dropped, and what could not be dropped.

    :param run: the run that moves shards of the group. This process holds it.
    :param at_once: whether to drop them even if their time is not over yet.
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
    """Drop the tables that a move has left of one shard on one node. Return False if there are
    none.

    :param old: the entry in the journal for these tables. Its keys ``shard``, ``node`` and
        ``number`` have the number of the shard, the name of the node, and the number of the move.
    :raises MoveFailed: the tables cannot be dropped at this time.
    :raises django.db.Error: a server has refused to drop the tables.
    """
    if old["node"] not in runtime.topology().nodes:
        raise MoveFailed("the topology has no such node")
    shard = runtime.shard(run.subject, old["shard"])
    if shard.node == old["node"]:
        # The shard is on this node again. The move back to this node has dropped the old tables.
        return False
    replica = old.get("replica")
    if replica is not None and replication.replicates(replica, old["node"]):
        raise MoveFailed(
            f"{replica!r} replicates from there: end that first, by 'shards split --cleanup'"
        )
    with node_connection(old["node"]) as wrapper:
        if shard.schema not in wrapper.schemas_present():
            # The tables are gone already. An earlier process may have dropped them and was killed
            # before it could record this, or the process that has undone the move has dropped them.
            return False
    with SchemaSessions(replace(shard, node=old["node"]), run.note) as sessions:
        if sessions.schema.hidden():
            remove_capture(sessions, old["number"])
        remove_copy(sessions)
    return True
