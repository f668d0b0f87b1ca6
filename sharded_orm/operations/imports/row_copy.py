"""Copy the rows of an import's source (the unsharded database) to the shards.

Each round goes through all tables. The copy ends after a round that has inserted and updated
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.db import connections

from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.model_cache import void_shards
from sharded_orm.operations.exceptions import ImportConflict, OperationStopped
from sharded_orm.operations.imports.preflight import check_import
from sharded_orm.operations.imports.ranges import range_units, report_of
from sharded_orm.operations.imports.request import ImportReport, ImportRequest, add_counts
from sharded_orm.operations.imports.row_shards import rows_by_alias
from sharded_orm.operations.imports.row_storage import EXAMPLES, ShardTable, Stored
from sharded_orm.operations.imports.source_tables import SourceRow, SourceTable
from sharded_orm.operations.imports.ticket_ids import advance_tickets
from sharded_orm.operations.runs.farm import Farm, FarmProgress, Job, PlannedUnit
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.runs.work_units import WorkUnit

KIND = "import"
# Names of counters in the report on a round. A round whose counter "copied" or "updated" is above 0
# has made progress, so another round may be needed.
_NEWS = ("copied", "updated")


def copy_rows(
    request: ImportRequest, threads: int, progress: FarmProgress, stopping: Stopping
) -> ImportReport:
    """Copy the rows of the request's tables to the shards of their keys, and return the report.

    Several processes may make the same call at once, on several machines; they share the work.
    After an interruption, call it again to continue where the work stopped. Rows are inserted with
    all their values; no signals are sent, and no method of a model is called. If the ids of a table
    come from ticket servers, the servers then continue above the imported ids.

    :param threads: number of threads that copy in this process.
    :param stopping: a flag that ends the work of this process early once it is set.
    :raises ImportRefused: the rows cannot be imported. Nothing was written.
    :raises OperationDiffers: other processes import different tables of the group.
    """
    report = Farm(_CopyJob(request), threads, progress, stopping).execute()
    return report_of(report)


class _CopyJob(Job):
    kind = KIND

    def __init__(self, request: ImportRequest) -> None:
        self._request = request
        self.subject = request.group
        self.arguments = {
            "models": request.labels,
            "source": request.source,
            "update": request.update,
        }

    def prepare(self) -> None:
        check_import(self._request)

    def plan(self, number: int) -> Iterator[PlannedUnit]:
        return range_units(number, self._request.tables, self._request.rows)

    def work(self, unit: WorkUnit, stopping: Stopping) -> Mapping[str, Any]:
        table = self._request.tables[unit.content["table"]]
        after = table.from_json(unit.content["first"])
        last = table.from_json(unit.content["last"])
        stored, read = Stored(), 0
        while True:
            # Read the range in batches, because it may have more rows now than when it was planned.
            # New rows may have been inserted into it. And the last range has no upper limit.
            rows = table.read(table.between(after, last)[: self._request.rows])
            read += len(rows)
            self._store(table, rows, stored, unit, stopping)
            if len(rows) < self._request.rows:
                return {"result": {"read": read, **asdict(stored)}}
            after = rows[-1].pk

    def _store(
        self,
        table: SourceTable,
        rows: Sequence[SourceRow],
        stored: Stored,
        unit: WorkUnit,
        stopping: Stopping,
    ) -> None:
        conflicts: list[str] = []
        written: list[str] = []
        # Usually, the cache is invalidated only for shards to which this call has written. But a
        # worker that was killed may have inserted rows of this unit (a range of rows), without
        # invalidating the cache. Then invalidate it for the shards of all rows of the unit. Only in
        # the second and later rounds, if no worker has begun the unit before, it is certain that
        # this is not needed.
        is_certain = unit.content["round"] > 1 and not unit.is_repeated
        try:
            for alias, rows_there in sorted(rows_by_alias(table, rows).items()):
                unit.check()
                if stopping():
                    raise OperationStopped(f"{unit.description} was left, to be gone on with.")
                before = stored.copied + stored.updated
                target = ShardTable(table, alias, update=self._request.update)
                try:
                    target.store(rows_there, stored)
                    target.note_waiting(rows_there, stored)
                except ImportConflict as exc:
                    conflicts.append(str(exc))
                finally:
                    connection: Any = connections[alias]
                    connection.close_and_forget()
                    if stored.copied + stored.updated > before or not is_certain:
                        written.append(alias)
        finally:
            cached = cached_model(table.model)
            if cached is not None and written:
                # Invalidate the cache. If a request has looked for one of the rows before it was
                # inserted, the cache remembers that the row does not exist.
                void_shards(cached, written)
        if conflicts:
            raise ImportConflict(" ".join(conflicts[:EXAMPLES]))

    # ##### Rounds #####

    def end_round(self, rounds: list[dict[str, Any]], units: Iterable[Mapping[str, Any]]) -> bool:
        tables: dict[str, dict[str, int]] = {}
        examples: list[str] = []
        for unit in units:
            result = dict(unit["result"])
            examples += result.pop("examples")[: max(EXAMPLES - len(examples), 0)]
            label = self._request.tables[unit["table"]].label
            add_counts(tables.setdefault(label, {}), result.items())
        rounds.append({"tables": tables, "examples": examples})
        # A row waits if it refers to a row that its shard does not have yet. That row may be one
        # that this round has copied since, so run one more round. If this round has copied no rows,
        # a further round would not copy any either.
        has_news = any(counts.get(name) for counts in tables.values() for name in _NEWS)
        return has_news and len(rounds) < self._request.rounds

    def summarize(self, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        last = rounds[-1]
        tables: dict[str, dict[str, int]] = {}
        for label, counts in last["tables"].items():
            tables[label] = {
                "rows": counts["read"],
                "copied": _total(rounds, label, "copied"),
                "updated": _total(rounds, label, "updated"),
                "differing": counts["differing"],
            }
        problems = self._problems(last, len(rounds))
        notes, ticket_problems = advance_tickets(self._request.tables)
        return {
            "tables": tables,
            "rounds": len(rounds),
            "problems": [*problems, *ticket_problems],
            "notes": notes,
        }

    def _problems(self, last: Mapping[str, Any], rounds: int) -> list[str]:
        def total(name: str) -> int:
            return sum(counts[name] for counts in last["tables"].values())

        problems = []
        if total("copied") or total("updated"):
            problems.append(
                f"the last round, number {rounds}, still found {total('copied') + total('updated')}"
                " new or changed rows. If the source is being written, stop its writes. Then run the"
                " command again"
            )
        examples = "; ".join(last["examples"])
        if total("differing"):
            problems.append(
                f"{total('differing')} rows have other values on their shard ({examples}). If the"
                " source has the newer ones, run the command with --update"
            )
        elif total("waiting"):
            problems.append(
                f"{total('waiting')} rows refer to rows that their shard does not have ({examples})."
                " Run the command again when the rows they refer to are on the source, with the same"
                " shard key"
            )
        return problems


def _total(rounds: Sequence[Mapping[str, Any]], label: str, name: str) -> int:
    return sum(part["tables"].get(label, {}).get(name, 0) for part in rounds)
