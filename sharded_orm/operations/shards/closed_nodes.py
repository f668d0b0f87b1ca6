"""Tells an operator what to do if a node does not answer because a promotion has closed it.

A *promotion* replaces a primary server by its replica. On PostgreSQL, its fence closes the databases of
the old primary, so that nobody gets in.
"""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS, Error, OperationalError
from django.db.utils import load_backend

from sharded_orm import runtime
from sharded_orm.backends.features import features_of
from sharded_orm.models.tables.journal import OperationRun
from sharded_orm.operations.promotion.recovery import to_finish, to_undo
from sharded_orm.operations.promotion.runner import KIND

# The journal is the table that records operations. To find the promotion that has closed a node, at
# most this number of the newest promotions are read from it.
_RECENT = 50


def closed_remedy(node: str, error: Exception) -> str:
    """Return a sentence that names the promotion that has closed ``node``, and what to do.

    Return "" if ``error`` does not say that the node's database is closed. If it does, one query
    reads the journal.

    :param error: the error of an attempt to connect to the node.
    """
    if not isinstance(error, OperationalError):
        return ""
    engine = runtime.topology().nodes[node]["ENGINE"]
    text = features_of(load_backend(engine).DatabaseWrapper).closed_database_error
    if not text or text not in str(error):
        return ""
    try:
        run = _last_promotion(node)
    except Error:
        run = None
    if run is None:
        return (
            "Its database is closed, as a promotion leaves it, but the journal has no promotion of this"
            " node. If nothing else serves its shards, open it there, in the database 'postgres', by"
            " ALTER DATABASE … ALLOW_CONNECTIONS true"
        )
    name, new = f"Promotion {run.pk} (shards promote {node})", run.arguments.get("new")
    if run.unfinished:
        forced = bool(run.arguments.get("force"))
        return (
            f"{name} has closed it, and is not finished. If no process works on it, finish it by"
            f" {to_finish(node, forced=forced)}, or undo it by {to_undo(node)}"
        )
    if run.state == "done":
        return (
            f"{name} has closed it, for good: {new!r} is the primary. Make {node!r} a replica of {new!r}"
            " by pg_rewind or a new pg_basebackup"
        )
    return (
        f"{name} had closed it, and has ended as {run.state!r}. If {node!r} is still the primary, open it"
        " there, in the database 'postgres', by ALTER DATABASE … ALLOW_CONNECTIONS true"
    )


def _last_promotion(node: str) -> OperationRun | None:
    runs = OperationRun.objects.using(DEFAULT_DB_ALIAS).filter(kind=KIND).order_by("-pk")
    for run in runs[:_RECENT]:
        nodes = {move["old"] for move in run.arguments.get("moves", ())}
        if node in nodes | {run.arguments.get("node")}:
            return run
    return None
