"""Refuse to start an operation while a conflicting operation is under way.

For example, shards cannot be migrated while keys move. Each operation has its own run in the
journal. The lease of a run keeps other processes from the same operation, but not from another one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sharded_orm.exceptions import OperationHeld
from sharded_orm.models.tables.journal import OperationRun
from sharded_orm.operations.exceptions import JournalMissing
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.global_database import require_journal
from sharded_orm.operations.runs.journal import JournalRun

#: Each run in the journal has a *subject*, which says what the operation works on. Usually, this is
#: the name of a group. An operation that works on all groups has this constant as its subject.
EVERYTHING: Final = "primaries"
#: Maps the kind of an operation to the command that ends an interrupted run, for messages. The
#: names in braces are replaced by the run's subject and arguments.
_COMMANDS: Final = {
    "migrate": "'manage.py migrate_shards'",
    "promote": "'manage.py shards promote {node}{force}'",
    "move keys": "'manage.py keys repair {subject}'",
    "move shards": "'manage.py shards move {subject} --repair'",
    "grow": (
        "the same 'manage.py shards grow {subject} …' as before, or by 'manage.py shards grow {subject}"
        " --abort'"
    ),
    "rolling": "'manage.py migrate_shards --rolling' (or undo it by the same with --abort)",
    "switch sides": "'manage.py shards switch {subject} --repair'",
    "rejoin": "'manage.py pairs rejoin {node}'",
}
#: Sets of kinds of operations that must not run at the same time. For example, moves create
#: triggers and copies of tables on the shards, which migrations would not expect.
_EXCLUSIVE: Final = (
    frozenset({"move keys", "migrate"}),
    frozenset({"move keys", "promote"}),
    frozenset({"move shards", "move keys"}),
    frozenset({"move shards", "migrate"}),
    frozenset({"move shards", "promote"}),
    frozenset({"move shards", "grow"}),
    *(
        frozenset({"rolling", other})
        for other in ("migrate", "promote", "move keys", "move shards", "grow", "switch sides")
    ),
    *(
        frozenset({"rejoin", other})
        for other in (
            "migrate",
            "promote",
            "move keys",
            "move shards",
            "grow",
            "switch sides",
            "rolling",
        )
    ),
    frozenset({"switch sides", "move keys"}),
    frozenset({"switch sides", "move shards"}),
    frozenset({"switch sides", "migrate"}),
    frozenset({"switch sides", "promote"}),
)


def broken_off(groups: Collection[str] | None = None) -> list[str]:
    """Return a sentence for each interrupted operation: which it is, and which command ends it.

    One query. Rolling upgrades are left out, because an operator may stop them between two steps.
    Imports are left out, because no operation has to wait for their end, and an import that follows
    its source is interrupted on purpose.

    :param groups: only return operations on these groups, and operations on all groups. By default
        (None), return every operation.
    """
    kinds = _COMMANDS.keys() - {"rolling"}
    try:
        with require_journal():
            unfinished = list(
                leases.with_silence(leases.runs()).filter(kind__in=kinds, unfinished=True)
            )
    except JournalMissing:
        return []
    return [
        f"Run {row.pk} ({row.kind} {row.subject!r}) was broken off. End it by {_command(row)}."
        for row in unfinished
        if (groups is None or row.subject == EVERYTHING or row.subject in groups)
        and not leases.is_held(row)  # None of these operations has workers, which imports have.
    ]


def _command(row: OperationRun) -> str:
    arguments = {**row.arguments, "force": " --force" if row.arguments.get("force") else ""}
    return _COMMANDS[row.kind].format_map({"node": "NODE", **arguments, "subject": row.subject})


def refuse_conflicts(
    run: JournalRun, *, only_held: bool = False, within: str | None = None
) -> None:
    """Raise an error if an operation that conflicts with ``run`` is under way. One query.

    Call this after ``run`` was begun or resumed. So if two operations begin at the same time, at
    least one of them notices the other. Before the error is raised, a new run is finished. A
    resumed run stays unfinished, so that it can be resumed later.

    :param only_held: True to ignore interrupted operations, on which no process works now.
    :param within: a kind of operation to ignore, because it is a part of ``run``, or ``run`` is a
        part of it. For example, a rolling upgrade switches sides.
    :raises OperationHeld: a conflicting operation is under way.
    """
    conflict = _conflict(run.kind, run.subject, only_held, within)
    if conflict:
        if not run.resumed:
            run.finish("refused", conflict)
        raise OperationHeld(conflict)


def _conflict(kind: str, subject: str, only_held: bool, within: str | None) -> str:
    others = {other for pair in _EXCLUSIVE if kind in pair for other in pair} - {kind, within}
    for row in leases.with_silence(leases.runs()).filter(kind__in=others, unfinished=True):
        if row.subject != subject and EVERYTHING not in (row.subject, subject):
            continue
        if leases.is_held(row):
            state = (
                f"is under way, by {row.user}@{row.host} (process {row.pid}). Wait until it ends"
            )
        elif not only_held:
            state = f"was broken off. End it by {_command(row)} first"
        else:
            continue
        return (
            f"{kind.capitalize()} of {subject!r} cannot run beside run {row.pk} ({row.kind}"
            f" {row.subject!r}), which {state}."
        )
    return ""
