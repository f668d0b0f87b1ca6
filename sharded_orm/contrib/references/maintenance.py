"""The actions of ``manage.py mirrors`` for reference tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, transaction
from django.db.models import DurationField, ExpressionWrapper, F, Max

from sharded_orm.contrib.mirrors.companions import CompanionReport
from sharded_orm.contrib.references.declaration import find_model, reference_models, shards
from sharded_orm.contrib.references.delivery import (
    CopyReport,
    behind,
    bring_all,
    lock_states,
    may_be_continued,
    states_on,
)
from sharded_orm.contrib.references.differences import CopyDifference, apply, compare_rows
from sharded_orm.contrib.references.versions import (
    changed_since,
    changes,
    global_version,
    lock,
    removed_ahead,
)
from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.topology.model import Shard


class ReferenceTables:
    """Checks and updates the copies of reference tables, for the command ``manage.py mirrors``.

    Implements :class:`~sharded_orm.contrib.mirrors.companions.Companion`.
    """

    def labels(self) -> list[str]:
        return sorted(model._meta.label for model in reference_models())

    def find(self, name: str) -> str | None:
        model = find_model(name)
        return None if model is None else model._meta.label

    def relay(self, stopping: Callable[[], bool]) -> CompanionReport:
        return _report(bring_all(stopping=stopping))

    def build(self, label: str, stopping: Callable[[], bool]) -> CompanionReport:
        return _report(bring_all(anew=[_model(label)], stopping=stopping))

    def check(
        self, label: str, *, repair: bool, newest_first: bool, sample: float | None
    ) -> CompanionReport:
        """Compare the copies on shards with the rows in the global database.

        A relay (``manage.py mirrors relay``) updates copies that a writer could not update. If a
        copy is outdated and a relay will update it, the copy counts as pending and not as a
        difference.

        Costs four queries per 500 rows and shard.

        :param repair: whether to write copies that differ.
        :param newest_first: whether to begin with the highest primary keys.
        :param sample: the part of the rows of each shard to compare, in chunks of 500, such as 0.1
            for about a tenth; None for all.
        """
        model, report = _model(label), CompanionReport()
        for shard in shards():
            try:
                found = compare_rows(model, shard.alias, newest_first=newest_first, sample=sample)
                _settle(shard, found, report, repair=repair)
            except (Error, ShardedOrmError) as exc:
                report.problems.append(f"{shard.alias}: {exc}")
        return report

    def status(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the state of the copies of each reference model, and sentences about problems.

        A state is a dict with the label of the model, the number of shards, the number of shards
        whose copies are behind, and their lag in seconds. Costs one query of the global database,
        one per shard, and two more for each model that is behind on a shard.
        """
        models = reference_models()
        if not models:
            return [], []
        version, problems = global_version(), list[str]()
        numbers = dict.fromkeys(models, 0)
        lags = dict.fromkeys(models, 0.0)
        count = 0
        for shard in shards():
            count += 1
            try:
                for model in behind(shard.alias, models, version):
                    numbers[model] += 1
                    lags[model] = max(lags[model], _lag(shard, model))
            except (Error, ShardedOrmError) as exc:
                problems.append(f"{shard.alias}: {exc}")
        found = [
            {
                "reference": model._meta.label,
                "shards": count,
                "behind": numbers[model],
                "lag": round(lags[model], 3),
            }
            for model in sorted(models, key=lambda model: model._meta.label)
        ]
        return found, problems


def _model(label: str) -> Any:
    model = find_model(label)
    assert model is not None
    return model


def _report(copied: CopyReport) -> CompanionReport:
    return CompanionReport(rows=copied.written, problems=copied.problems)


def _settle(shard: Shard, found: CopyDifference, report: CompanionReport, *, repair: bool) -> None:
    """Compare the rows in ``found`` a second time, and report the copies that still differ.

    :param found: the differences that a first comparison without locks has found.
    :param repair: whether to also repair the copies that still differ.
    """
    model = found.model
    report.rows += found.compared
    if not len(found):
        return
    # Some rows may seem to differ only because they were written during the first comparison. So
    # compare again under the lock of the reference tables: writers need it to commit, so no row
    # changes meanwhile.
    with transaction.atomic(using=DEFAULT_DB_ALIAS):
        now = lock()
        with transaction.atomic(using=shard.alias):
            state = lock_states(shard.alias).get(model._meta.label)
            found = compare_rows(model, shard.alias, found.pks)
            if not may_be_continued(state, model, now):
                report.pending += len(found)
                return
            pending = {*changed_since(model, state.version), *removed_ahead(model, state)}
            report.pending += found.drop(pending)
            report.differences += _sentences(found, shard)
            if repair:
                apply([found], shard.alias)


def _sentences(found: CopyDifference, shard: Shard) -> Iterator[str]:
    label = found.model._meta.label
    for kind, pks in (
        ("missing", map(found.pk_of, found.missing)),
        ("stale", map(found.pk_of, found.stale)),
        ("orphaned", found.orphaned),
    ):
        for pk in pks:
            yield f"{label}(pk={pk!r}) on {shard.alias} is {kind}"


def _lag(shard: Shard, model: Any) -> float:
    """Return the age in seconds of the oldest change that the copies of ``model`` on a shard lack.

    0.0 if the age is not known.
    """
    state = states_on(shard.alias).get(model._meta.label)
    rows = changes().filter(name=model._meta.label)
    if state is not None:
        rows = rows.filter(version__gt=state.version)
    age = ExpressionWrapper(DatabaseClock() - F("changed_at"), output_field=DurationField())
    found = rows.aggregate(lag=Max(age))["lag"]
    return found.total_seconds() if found is not None else 0.0
