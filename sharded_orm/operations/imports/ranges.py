"""Divide the tables of an import into ranges of primary keys, and report on the finished ranges.

A range is the unit of work that one process does at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sharded_orm.operations.imports.request import ImportReport
from sharded_orm.operations.imports.source_tables import SourceTable, describe_range
from sharded_orm.operations.runs.farm import FarmReport, PlannedUnit


def report_of(report: FarmReport) -> ImportReport:
    """Return the report on an import, or on a comparison of imported rows.

    :param report: the report on the same work from :mod:`sharded_orm.operations.runs.farm`, which
        shares the work among processes.
    """
    summary = report.summary
    problems = [*report.failures, *summary.get("problems", ())]
    if report.finished and not summary:
        problems.append(
            "the run was given up or refused; 'manage.py shards import' begins a new one"
        )
    return ImportReport(
        report.run,
        report.finished,
        summary.get("tables", {}),
        summary.get("rounds", 0),
        problems,
        list(summary.get("notes", ())),
        report.stopped,
        report.left,
    )


def range_units(number: int, tables: Sequence[SourceTable], rows: int) -> Iterator[PlannedUnit]:
    """Yield the units of work of one round, which goes through all tables.

    Each unit is a range of primary keys with ``rows`` rows.

    :param number: the number of the round.
    """
    for index, table in enumerate(tables):
        for count, (first, last) in enumerate(table.ranges(rows)):
            content = {
                "round": number,
                "table": index,
                "first": table.to_json(first),
                "last": table.to_json(last),
            }
            name = f"{number:04d}.{index:03d}.{count:09d}"
            yield name, describe_range(table, first, last), content
