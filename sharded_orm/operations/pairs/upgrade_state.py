"""Whether a rolling upgrade of a pair is not finished, as the journal says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING

KIND: Final = "rolling"
#: The steps of each round, in their order.
STEPS: Final = ("migrate-passive", "compare", "switch", "migrate-other", "finish")
#: The same for an upgrade during which writes are refused.
STOPPED_STEPS: Final = ("stop-writes", "migrate-passive", "migrate-active", "compare", "open")
#: The steps that cannot be undone once they have begun.
_FINAL: Final = ("migrate-other", "migrate-active")


def steps_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the steps of each round of an upgrade.

    :param arguments: those of its run in the journal.
    """
    return STOPPED_STEPS if arguments.get("stop_writes") else STEPS


def unfinished_run() -> journal.RunStatus | None:
    """Return the run of the rolling upgrade that is not finished; None if there is none.

    ``pair`` in its arguments has the two nodes. One query, or two if no process works on it.
    """
    last = journal.last_run(KIND, EVERYTHING)
    is_upgrade = last is not None and last.finished_at is None and "done" in last.arguments
    return last if is_upgrade else None


def can_be_aborted(arguments: Mapping[str, Any]) -> bool:
    """Return whether the round of an unfinished upgrade can still be undone.

    :param arguments: those of its run in the journal.
    """
    names, done = steps_of(arguments), int(arguments["done"])
    final = next(names.index(name) for name in _FINAL if name in names)
    first = done // len(names) * len(names)
    return int(arguments.get("begun", done)) < first + final


def command_of(arguments: Mapping[str, Any]) -> str:
    """Return the command with which an unfinished upgrade, or its abort, goes on.

    :param arguments: those of its run in the journal.
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
    """Return a sentence if a rolling upgrade of the pair is not finished; otherwise "". One or two queries."""
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
    """Return a sentence if a rolling upgrade was broken off, of any pair; otherwise "". One or two queries."""
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
    """Return a sentence if an unfinished upgrade may have let both sides of a pair refuse writes.

    Otherwise return "". One or two queries.
    """
    arguments = _unfinished()
    if arguments.get("stop_writes") or arguments.get("aborting"):
        return unfinished(*arguments["pair"])
    return ""


def _unfinished() -> dict[str, Any]:
    run = unfinished_run()
    return dict(run.arguments) if run else {}
