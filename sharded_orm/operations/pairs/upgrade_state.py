"""Find out from the journal whether a rolling upgrade of a pair of servers is unfinished.

A rolling upgrade migrates the two servers of a pair one after the other. Most other commands refuse
to work on the shards until the upgrade is finished or undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING

KIND: Final = "rolling"
#: The steps of each round, in their order. An upgrade consists of rounds. Each round upgrades
#: shards that are active on the same side.
STEPS: Final = ("migrate-passive", "compare", "switch", "migrate-other", "finish")
#: The steps of each round if the upgrade was begun with ``--stop-writes``: writes are refused
#: while the tables change.
STOPPED_STEPS: Final = ("stop-writes", "migrate-passive", "migrate-active", "compare", "open")
#: When one of these steps has begun, the round cannot be undone any more. Each round has exactly
#: one of them: "migrate-active" if the upgrade was begun with ``--stop-writes``.
_FINAL: Final = ("migrate-other", "migrate-active")


def steps_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the steps of which each round of an upgrade consists, in their order.

    :param arguments: the arguments of the upgrade's run, from the journal.
    """
    return STOPPED_STEPS if arguments.get("stop_writes") else STEPS


def unfinished_run() -> journal.RunStatus | None:
    """Return the journal's run of the rolling upgrade that is not finished; None if there is none.

    The run's ``arguments["pair"]`` has the names of the pair's two nodes. Costs one query, or two
    if no process works on the run at the moment.
    """
    last = journal.last_run(KIND, EVERYTHING)
    is_upgrade = last is not None and last.finished_at is None and "done" in last.arguments
    return last if is_upgrade else None


def can_be_aborted(arguments: Mapping[str, Any]) -> bool:
    """Return whether the current round of an unfinished upgrade can still be undone.

    :param arguments: the arguments of the upgrade's run, from the journal.
    """
    names, done = steps_of(arguments), int(arguments["done"])
    final = next(names.index(name) for name in _FINAL if name in names)
    first = done // len(names) * len(names)
    return int(arguments.get("begun", done)) < first + final


def command_of(arguments: Mapping[str, Any]) -> str:
    """Return the command that an operator has to run to continue an unfinished upgrade.

    If the upgrade is being undone, the command continues the undo.

    :param arguments: the arguments of the upgrade's run, from the journal.
    """
    if lost := arguments.get("given_up"):
        return f"manage.py shards switch GROUP --all-from {lost} --force"
    options = ["--rolling"]
    if arguments.get("aborting"):
        options.append("--abort")
    elif arguments.get("stop_writes"):
        options.append("--stop-writes")
    targets = filter(None, arguments.get("targets") or ())
    return " ".join(["manage.py migrate_shards", *targets, *options])


def unfinished(first: str, second: str) -> str:
    """Return a sentence about the unfinished rolling upgrade of a pair; "" if there is none.

    The sentence says how far the upgrade has come, and which command finishes or undoes it. Costs
    one or two queries.

    :param first, second: the names of the pair's nodes, in any order.
    """
    arguments = _unfinished()
    if set(arguments.get("pair", ())) != {first, second}:
        return ""
    steps = steps_of(arguments)
    step = steps[int(arguments["done"]) % len(steps)]
    if lost := arguments.get("given_up"):
        state = f"is being ended without {lost!r}, which is given up"
    elif arguments.get("aborting"):
        state = "is being aborted, and shards may refuse writes"
    elif arguments.get("stop_writes"):
        state = f"goes on with its step {step!r}, and shards refuse writes"
    else:
        state = f"goes on with its step {step!r}, and replication stands still where it must"
    return f"a rolling upgrade of {first!r} and {second!r} {state}: {_ways_out(arguments)}"


def broken_off() -> str:
    """Return a sentence about a rolling upgrade that was interrupted; "" if there is none.

    The upgrade may be of any pair. It counts as interrupted if it is unfinished and no process
    works on it. Costs one or two queries.
    """
    run = unfinished_run()
    if run is None or run.held:
        return ""
    first, second = run.arguments["pair"]
    return f"The rolling upgrade of {first!r} and {second!r} was broken off: {_ways_out(run.arguments)}."


def _ways_out(arguments: Mapping[str, Any]) -> str:
    command = command_of(arguments)
    text = f"finish it by {command!r} first"
    is_plain = not (arguments.get("given_up") or arguments.get("aborting"))
    if is_plain and can_be_aborted(arguments):
        undoing = command.replace(" --stop-writes", "") + " --abort"
        text += f", or undo its round by {undoing!r}"
    return text


def stopped_writes() -> str:
    """Return a sentence if shards may refuse writes on both sides of a pair because of an upgrade.

    This is so if an unfinished upgrade was begun with ``--stop-writes``, or is being undone.
    Otherwise return "". Costs one or two queries.
    """
    arguments = _unfinished()
    if arguments.get("stop_writes") or arguments.get("aborting"):
        return unfinished(*arguments["pair"])
    return ""


def _unfinished() -> dict[str, Any]:
    run = unfinished_run()
    return dict(run.arguments) if run else {}
