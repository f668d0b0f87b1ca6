"""Operations that must not run beside each other, although each has a run of its own."""

from __future__ import annotations

from typing import Final

from sharded_orm.exceptions import OperationHeld
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.journal import JournalRun

#: The subject of operations on all groups.
EVERYTHING: Final = "primaries"
#: The commands that end a run of a kind, for messages.
_COMMANDS: Final = {
    "migrate": "'manage.py migrate_shards'",
    "promote": "'manage.py shards promote'",
    "move keys": "'manage.py keys repair {subject}'",
    "move shards": "'manage.py shards move {subject} --repair'",
    "grow": "'manage.py shards grow {subject}'",
}
#: Kinds that exclude each other. Moves put triggers and copies of tables on the shards.
_EXCLUSIVE: Final = (
    frozenset({"move keys", "migrate"}),
    frozenset({"move keys", "promote"}),
    frozenset({"move shards", "move keys"}),
    frozenset({"move shards", "migrate"}),
    frozenset({"move shards", "promote"}),
    frozenset({"move shards", "grow"}),
)


def refuse_conflicts(run: JournalRun, *, only_held: bool = False) -> None:
    """Make sure that no operation is under way beside which ``run`` must not be. One query.

    The other operations do the same, each after it has taken its run. So of two that begin at once,
    at least one sees the other. A run that has just begun is finished if it is refused.

    :param only_held: whether to ignore operations that were broken off.
    :raises OperationHeld: there is one.
    """
    conflict = _conflict(run.kind, run.subject, only_held)
    if conflict:
        if not run.resumed:
            run.finish("refused", conflict)
        raise OperationHeld(conflict)


def _conflict(kind: str, subject: str, only_held: bool) -> str:
    others = {other for pair in _EXCLUSIVE if kind in pair for other in pair} - {kind}
    for row in leases.with_silence(leases.runs()).filter(kind__in=others, unfinished=True):
        if row.subject != subject and EVERYTHING not in (row.subject, subject):
            continue
        if leases.is_held(row):
            state = (
                f"is under way, by {row.user}@{row.host} (process {row.pid}). Wait until it ends"
            )
        elif not only_held:
            command = _COMMANDS[row.kind].format(subject=row.subject)
            state = f"was broken off. End it by {command} first"
        else:
            continue
        return (
            f"{kind.capitalize()} of {subject!r} cannot run beside run {row.pk} ({row.kind}"
            f" {row.subject!r}), which {state}."
        )
    return ""
