"""Counts writes that were not delivered to mirrors yet, and writes that relays have given up."""

from __future__ import annotations

from dataclasses import dataclass, field

from django.db import Error
from django.db.models import Count, DurationField, ExpressionWrapper, F, Max, Q

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.outbox import outbox_rows
from sharded_orm.contrib.mirrors.relay import MOST_ATTEMPTS, source_groups
from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import ShardedOrmError


@dataclass
class Backlog:
    """The rows in the outboxes of all shards.

    An outbox row is a write that has to be delivered to mirrors.

    :param rows: number of rows. Delivered rows are removed in batches, so this may include up to
        100 rows per process and shard that were delivered already.
    :param lag: age in seconds of the oldest row that a relay will still try to deliver; 0.0 if
        there is none.
    :param dead: sentences about dead letters, at most ten per shard. A dead letter is a row that
        relays have failed to deliver too often, and do not try to deliver any more.
    :param problems: sentences about shards that did not answer.
    """

    rows: int = 0
    lag: float = 0.0
    dead: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def backlog() -> Backlog:
    """Return the :class:`Backlog` of all shards with models that have mirrors.

    One query per shard, and one more for a shard with dead letters (writes that relays have given up).
    """
    found = Backlog()
    age = ExpressionWrapper(DatabaseClock() - F("written_at"), output_field=DurationField())
    for group in source_groups():
        for shard in runtime.group(group).shards():
            try:
                counts = outbox_rows(shard.alias).aggregate(
                    rows=Count("pk"),
                    dead=Count("pk", filter=Q(attempts__gte=MOST_ATTEMPTS)),
                    lag=Max(age, filter=Q(attempts__lt=MOST_ATTEMPTS)),
                )
                found.rows += counts["rows"]
                if counts["lag"] is not None:
                    found.lag = max(found.lag, counts["lag"].total_seconds())
                if counts["dead"]:
                    found.dead += [
                        f"{shard.alias}: {row.source}(pk={row.row!r}): {row.error}"
                        for row in outbox_rows(shard.alias)
                        .filter(attempts__gte=MOST_ATTEMPTS)
                        .order_by("pk")[:10]
                    ]
            except (Error, ShardedOrmError) as exc:
                found.problems.append(f"{shard.alias}: {exc}")
    return found
