"""Whether a rolling upgrade of a pair is not finished, as the journal says."""

from __future__ import annotations

from typing import Final

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING

KIND: Final = "rolling"
#: The steps of each round, in their order.
STEPS: Final = ("migrate-passive", "compare", "switch", "migrate-other", "finish")


def unfinished(first: str, second: str) -> str:
    """Return a sentence if a rolling upgrade of the pair is not finished; otherwise "". One query."""
    last = journal.last_run(KIND, EVERYTHING)
    if last is None or last.finished_at is not None or "done" not in last.arguments:
        return ""
    if set(last.arguments["pair"]) != {first, second}:
        return ""
    step = STEPS[int(last.arguments["done"]) % len(STEPS)]
    return (
        f"a rolling upgrade of {first!r} and {second!r} goes on with its step {step!r}, and replication"
        " stands still where it must: finish it by 'manage.py migrate_shards --rolling' first"
    )
