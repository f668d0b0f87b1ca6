"""Compare all rows of an import's source with the rows on the shards, in both directions.

First, each row of the source must be on the shard of its key, with equal values. Then, each row of
a shard must be on the source, and its key must belong to this shard.

The purpose is to find errors of the code that copied the rows, so the comparison does not use that
code. It reads rows with Django's query sets and field classes, and looks up the shard of each key
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.db import connections
from django.db.models import F, JSONField, QuerySet, TextField
from django.db.models.functions import Cast

from sharded_orm import runtime
from sharded_orm.models.sharding.options import target_field
from sharded_orm.operations.exceptions import OperationStopped
from sharded_orm.operations.imports.preflight import check_source
from sharded_orm.operations.imports.ranges import range_units, report_of
from sharded_orm.operations.imports.request import ImportReport, ImportRequest, add_counts
from sharded_orm.operations.imports.source_tables import SourceTable
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs.farm import Farm, FarmProgress, Job, PlannedUnit
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.runs.work_units import WorkUnit

KIND = "import check"
#: The largest numbers of differences that are reported: for one range of rows, and for all ranges
#: together.
_EXAMPLES, _REPORTED = 20, 100
_LOOK_UPS = 500
_COUNTS = ("rows", "missing", "differing", "surplus", "misplaced")


def compare_rows(
    request: ImportRequest, threads: int, progress: FarmProgress, stopping: Stopping
) -> ImportReport:
    """Compare all rows of the request's tables with those on the shards, and return the report.

    Changes nothing. The report's problems name the differences: rows that are missing on their
    shard, rows with different values, rows that the source does not have, and rows on a wrong
    shard. A row that somebody writes during the comparison may be reported although it is correct.

    Several processes may make the same call at once; they share the work.

    :param threads: number of threads in this process.
    :param stopping: a flag that ends the work of this process early once it is set.
    :raises ImportRefused: a table cannot be read on the source or on a shard.
    """
    return report_of(Farm(_CompareJob(request), threads, progress, stopping).execute())


class _Differences:
    """The differences in one range of rows: how many there are, and sentences about some of them."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self.examples: list[str] = []

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(text)


class _CompareJob(Job):
    kind = KIND

    def __init__(self, request: ImportRequest) -> None:
        self._request = request
        self.subject = request.group
        self.arguments = {"models": request.labels, "source": request.source}

    def prepare(self) -> None:
        check_source(self._request)

    def plan(self, number: int) -> Iterator[PlannedUnit]:
        tables = self._request.tables
        yield from range_units(number, tables, self._request.rows)
        for index, table in enumerate(tables, len(tables)):
            for shard in runtime.group(self._request.group).shards():
                name = f"{number:04d}.{index:03d}.{shard.number:09d}"
                content = {"table": index - len(tables), "shard": shard.alias}
                yield name, f"{table.label} on {shard.alias}", content

    def work(self, unit: WorkUnit, stopping: Stopping) -> Mapping[str, Any]:
        table = self._request.tables[unit.content["table"]]
        differences = _Differences()

        def check() -> None:
            unit.check()
            if stopping():
                raise OperationStopped(f"{unit.description} was left, to be gone on with.")

        alias = unit.content.get("shard")
        if alias is not None:
            _compare_shard(table, alias, differences, check)
        else:
            first = table.from_json(unit.content["first"])
            last = table.from_json(unit.content["last"])
            _compare_range(table, first, last, self._request.rows, differences, check)
        return {"counts": differences.counts, "examples": differences.examples}

    def end_round(self, rounds: list[dict[str, Any]], units: Iterable[Mapping[str, Any]]) -> bool:
        tables: dict[str, dict[str, int]] = {}
        examples: list[str] = []
        for unit in units:
            label = self._request.tables[unit["table"]].label
            add_counts(tables.setdefault(label, {}), unit["counts"].items())
            examples += unit["examples"]
        for table in self._request.tables:
            # Count the rows of the source once more. If there are more rows than were compared,
            # some were not compared. For example, rows may have been inserted into a range after
            # its comparison.
            count = QuerySet(table.model, using=table.alias).count()
            if count > tables[table.label]["rows"]:
                examples.append(
                    f"{table.label} has {count} rows on {table.alias!r}, but only"
                    f" {tables[table.label]['rows']} were compared: stop the writes, and compare again"
                )
        rounds.append({"tables": tables, "examples": examples[:_REPORTED]})
        return False

    def summarize(self, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        (only,) = rounds
        problems = list(only["examples"])
        total = sum(counts[kind] for counts in only["tables"].values() for kind in _COUNTS[1:])
        if total > len(problems):
            problems.append(f"{total - len(problems)} more differences are not listed")
        return {"tables": only["tables"], "rounds": 1, "problems": problems}


# ##### Comparison of the source's rows with those of the shards #####


def _compare_range(
    table: SourceTable, first: Any, last: Any, size: int, differences: _Differences, check: Any
) -> None:
    comparison = _RowComparison(table)
    while True:
        check()
        source: QuerySet[Any] = QuerySet(table.model, using=table.alias)
        rows = source.order_by(*table.pk_names)
        rows = rows if first is None else rows.filter(pk__gt=first)
        rows = rows if last is None else rows.filter(pk__lte=last)
        batch = comparison.read(rows[:size], table.key_path)
        differences.counts["rows"] += len(batch)
        by_alias: dict[str | None, dict[Any, Any]] = {}
        for pk, (values, key) in batch.items():
            by_alias.setdefault(_alias_of(table, key), {})[pk] = values
        for alias, rows_there in by_alias.items():
            check()
            comparison.compare(alias, rows_there, differences)
        if len(batch) < size:
            return
        first = next(reversed(batch))


def _alias_of(table: SourceTable, key: Any) -> str | None:
    shard = None if key is None else runtime.locate(table.options.group, key)
    return None if shard is None else shard.alias


class _RowComparison:
    """Compares rows of one table on the source of an import with those on shards.

    The values are compared as Django reads them. But if a field class changes values when it reads
    them, the stored values are compared as text.
    """

    def __init__(self, table: SourceTable) -> None:
        self._table = table
        self._fields: list[Any] = list(table.model._meta.local_concrete_fields)
        names = [field.attname for field in self._fields]
        self._pk_places = [names.index(name) for name in table.pk_names]

    def read(self, rows: QuerySet[Any], key_path: str | None) -> dict[Any, tuple[Any, Any]]:
        """Return a dict that maps the primary key of each row to a pair (values, shard key)."""
        columns: list[Any] = [self._expression(field) for field in self._fields]
        # Read the shard key as an extra column, because it may be in the table of a parent row.
        paths = [] if key_path is None else [F(key_path)]
        by_pk = {}
        for row in rows.values_list(*columns, *paths):
            values = row[: len(columns)]
            pk = tuple(values[place] for place in self._pk_places)
            key = self._table.key_field.get_prep_value(row[-1]) if paths else None
            by_pk[pk[0] if len(pk) == 1 else pk] = (values, key)
        return by_pk

    def _expression(self, field: Any) -> Any:
        # If the field class changes values when it reads them, two different values might look
        # equal. For example, it may round them. So let the database convert the stored value to
        # text.
        if hasattr(target_field(field), "from_db_value"):
            return Cast(F(field.attname), TextField())
        return F(field.attname)

    def compare(
        self, alias: str | None, rows: Mapping[Any, Any], differences: _Differences
    ) -> None:
        """Compare ``rows`` of the source with the rows on one shard.

        :param alias: the alias of the shard to which the keys of the rows belong; None if no shard
            is known for them.
        :param rows: maps the primary key of each row of the source to the row's values.
        :param differences: receives what differs.
        """
        label = self._table.label
        there: dict[Any, tuple[Any, Any]] = {}
        if alias is not None:
            shard_rows: QuerySet[Any] = QuerySet(self._table.model, using=alias)
            for batch in batched(rows, _LOOK_UPS):
                there |= self.read(shard_rows.filter(pk__in=batch), None)
            connection: Any = connections[alias]
            connection.close_and_forget()
        for pk, values in rows.items():
            if pk not in there:
                where = "any shard: its key has none" if alias is None else repr(alias)
                differences.add("missing", f"{label}(pk={pk!r}) is missing on {where}")
                continue
            stored = there[pk][0]
            # Name the columns that differ, but not their values. The journal stores this text, and
            # the values may be personal data.
            columns = [
                repr(field.attname)
                for field, before, after in zip(self._fields, values, stored, strict=True)
                if not _equals(field, before, after)
            ]
            if columns:
                text = f"{label}(pk={pk!r}) on {alias!r} has another {', '.join(columns)}"
                differences.add("differing", text)


def _plain_json(text: str) -> str:
    """Return the JSON ``text`` in a form that is the same for equal values.

    Compare these texts and not the parsed values: Python takes ``True`` and ``1`` for equal, but
    in JSON they differ.
    """
    return json.dumps(json.loads(text), sort_keys=True)


def _equals(field: Any, before: Any, after: Any) -> bool:
    if type(before) is type(after) and before == after:
        return True
    if before is None or after is None:
        return before is after
    if isinstance(target_field(field), JSONField):
        try:
            return _plain_json(before) == _plain_json(after)
        except ValueError:
            return False
    # NaN differs even from itself in Python, but here two NaN values count as equal.
    return bool(before != before and after != after)


# ##### Comparison of the shards' rows with those of the source #####


def _compare_shard(table: SourceTable, alias: str, differences: _Differences, check: Any) -> None:
    """Report each row of a shard that the source does not have, or whose key belongs to another
    shard.
    """
    last: Any = None
    rows: QuerySet[Any] = QuerySet(table.model, using=alias).order_by(*table.pk_names)
    source: QuerySet[Any] = QuerySet(table.model, using=table.alias)
    single = len(table.pk_names) == 1
    try:
        while True:
            check()
            later = rows if last is None else rows.filter(pk__gt=last)
            found = list(later.values_list(*table.pk_names)[:_LOOK_UPS])
            pks = [pk[0] if single else tuple(pk) for pk in found]
            if not pks:
                return
            keys = {}
            names = (*table.pk_names, table.key_path)
            for *pk, key in source.filter(pk__in=pks).values_list(*names):
                keys[pk[0] if single else tuple(pk)] = table.key_field.get_prep_value(key)
            for pk in pks:
                name = f"{table.label}(pk={pk!r})"
                if pk not in keys:
                    differences.add(
                        "surplus", f"{name} is on {alias!r}, but not on {table.alias!r}"
                    )
                elif (home := _alias_of(table, keys[pk])) != alias:
                    differences.add(
                        "misplaced",
                        f"{name} is on {alias!r}, but its key {keys[pk]!r} belongs on {home!r}",
                    )
            last = pks[-1]
    finally:
        connection: Any = connections[alias]
        connection.close_and_forget()
