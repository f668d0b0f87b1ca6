"""The relay delivers writes of sources that the writers themselves could not deliver.

Such writes are left in the outboxes of shards. Any number of relays may run at the same time. It
does no harm if two of them deliver the same row, because an older version never overwrites a newer
one. A relay takes a lease on the outbox of a shard only to save other relays the same work.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import Error
from django.db.models import F, QuerySet

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Source, source_of, sources
from sharded_orm.contrib.mirrors.delivery import deliver, is_outage, rows_to_deliver
from sharded_orm.contrib.mirrors.models import OutboxRow
from sharded_orm.contrib.mirrors.outbox import BATCH, entry_of, outbox_rows, remove
from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import LeaseLost, OperationHeld, ShardedOrmError
from sharded_orm.operations.runs.work_lease import leased

logger = logging.getLogger("sharded_orm.mirrors")

KIND = "mirrors relay"
#: A row of the outbox becomes a dead letter after this many failures. Only ``relay --retry-dead``
#: lets relays try it again.
MOST_ATTEMPTS = 10
#: Relays skip rows of the outbox that are younger than this number of seconds, because their
#: writers are probably just delivering them.
MIN_AGE = 1.0


@dataclass
class RelayReport:
    """What one round of a relay has done.

    :param delivered: number of outbox rows that were delivered and removed.
    :param failed: number of outbox rows that could not be delivered.
    :param held: aliases of shards that were skipped, because another relay delivers their rows.
    :param problems: sentences about shards and rows.
    """

    delivered: int = 0
    failed: int = 0
    held: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def source_groups() -> list[str]:
    """Return the names of the shard groups whose shards may have rows in their outboxes."""
    return sorted({source.options.group for source in sources()})


def relay(*, min_age: float = MIN_AGE, stopping: Callable[[], bool] = lambda: False) -> RelayReport:
    """Deliver the rows in the outboxes of all shards, once. Costs one query per shard without work.

    A shard that does not answer, or on which another relay works, is left out.

    :param min_age: rows that are younger than this number of seconds are skipped, because their
        writers are probably still delivering them.
    :param stopping: returns True if the relay is to stop after the current batch.
    """
    report = RelayReport()
    for group in source_groups():
        for shard in runtime.group(group).shards():
            if stopping():
                return report
            try:
                if _open_rows(shard.alias, min_age).exists():
                    _relay_shard(shard.alias, min_age, stopping, report)
            except OperationHeld:
                report.held.append(shard.alias)
            except LeaseLost as exc:
                report.problems.append(str(exc))
            except (Error, ShardedOrmError) as exc:
                report.problems.append(f"{shard.alias}: {exc}")
    return report


def retry_dead_letters() -> int:
    """Let relays try again to deliver dead letters, the rows that they have given up. Return their number."""
    return sum(
        outbox_rows(shard.alias).filter(attempts__gte=MOST_ATTEMPTS).update(attempts=0)
        for group in source_groups()
        for shard in runtime.group(group).shards()
    )


def _open_rows(alias: str, min_age: float) -> QuerySet[OutboxRow]:
    rows = outbox_rows(alias).filter(attempts__lt=MOST_ATTEMPTS)
    if min_age:
        rows = rows.filter(written_at__lte=DatabaseClock() - timedelta(seconds=min_age))
    return rows


def _relay_shard(
    alias: str, min_age: float, stopping: Callable[[], bool], report: RelayReport
) -> None:
    with leased(KIND, alias) as lease:
        last = 0
        while not stopping():
            lease.check()
            batch = list(_open_rows(alias, min_age).filter(pk__gt=last).order_by("pk")[:BATCH])
            if not batch:
                return
            last = batch[-1].pk
            deliver_batch(alias, batch, report)


def deliver_batch(alias: str, batch: Iterable[OutboxRow], report: RelayReport) -> None:
    """Deliver rows of the outbox of ``alias``, and remove the rows that have reached all mirrors."""
    by_source: dict[str, list[OutboxRow]] = defaultdict(list)
    for row in batch:
        by_source[row.source].append(row)
    for label, rows in by_source.items():
        source = source_of(label)
        if source is None:
            # Keep the rows, because this process may run old code. A process with newer code may
            # know mirrors of the model, and deliver the rows.
            report.failed += len(rows)
            report.problems.append(
                f"{alias}: {len(rows)} rows of {label!r}, which has no mirrors in this process. If it has"
                " none any more, delete the rows from the outbox."
            )
            continue
        _deliver_rows(alias, source, rows, report)


def _deliver_rows(
    alias: str, source: Source, rows: Sequence[OutboxRow], report: RelayReport
) -> None:
    entries = [entry_of(source, row) for row in rows]
    failures = deliver(rows_to_deliver(entries), source.mirrors)
    delivered = [entry.number for entry in entries if entry.written.pk not in failures]
    remove(alias, delivered)
    report.delivered += len(delivered)
    report.failed += len(entries) - len(delivered)
    for pk, exc in failures.items():
        report.problems.append(f"{alias}: {source.model.__name__}(pk={pk!r}): {exc}")
        if not is_outage(exc):
            numbers = [entry.number for entry in entries if entry.written.pk == pk]
            outbox_rows(alias).filter(pk__in=numbers).update(
                attempts=F("attempts") + 1, error=str(exc)[:1000]
            )


def describe(report: RelayReport) -> dict[str, Any]:
    """Return ``report`` as a dict, to be shown as JSON."""
    return {
        "delivered": report.delivered,
        "failed": report.failed,
        "held": report.held,
        "problems": report.problems,
    }
