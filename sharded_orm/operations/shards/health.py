"""Run all checks of shards.

The checks find nodes that do not answer and shards that are not migrated (:func:`status`), wrong
collations of text keys, schema drift, shards that make ids of other shards, misplaced rows, and
broken relations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sharded_orm.ids.timestamps_postgresql import FUNCTION_PREFIX
from sharded_orm.models.text_keys import InexactKey, inexact_keys
from sharded_orm.operations.nodes import Alive, ask_nodes, node_connection
from sharded_orm.operations.shards.broken_relations import (
    CrossKeyRows,
    DanglingReferences,
    RelationScan,
)
from sharded_orm.operations.shards.collations import InexactColumn, inexact_columns
from sharded_orm.operations.shards.drift import Drift, Schemas
from sharded_orm.operations.shards.fleet_status import FleetStatus, GroupOnNode, ShardStatus
from sharded_orm.operations.shards.foreign_ids import ForeignIDs
from sharded_orm.operations.shards.misplaced_rows import Misplaced, RowScan
from sharded_orm.operations.shards.status import PATIENCE, error_line, status
from sharded_orm.topology.model import Shard

#: Default number of rows to check in each table of each shard.
SAMPLE = 100


@dataclass(frozen=True)
class HealthReport:
    """The results of :func:`check`.

    :param inexact: columns whose collation treats two different shard keys as equal.
    :param drifts: shards whose tables differ from those of most shards with the same migrations.
    :param foreign_ids: functions and counters that would make ids of another shard.
    :param misplaced: rows that are not on the shard of their key.
    :param cross_key: rows that are related to rows with a different shard key.
    :param dangling: rows that refer to a row that does not exist, by a foreign key to a global
        model or by a generic foreign key.
    :param rows: number of rows that the search for misplaced rows has read.
    :param errors: maps the name of a shard, node, group or model to the reason why a check of it
        could not be finished.
    """

    status: FleetStatus
    inexact: tuple[InexactColumn, ...]
    drifts: tuple[Drift, ...]
    foreign_ids: tuple[ForeignIDs, ...]
    misplaced: tuple[Misplaced, ...]
    cross_key: tuple[CrossKeyRows, ...]
    dangling: tuple[DanglingReferences, ...]
    rows: int
    errors: dict[str, str]

    @property
    def problems(self) -> list[str]:
        """A sentence for each problem that was found, which also says what to do."""
        return [
            *self.status.problems,
            *(f"{column.problem} {column.remedy}" for column in self.inexact),
            *map(_drift_problem, self.drifts),
            *(f"{ids.problem} {ids.remedy}" for ids in self.foreign_ids),
            *map(_misplaced_problem, self.misplaced),
            *(rows.problem for rows in self.cross_key),
            *(rows.problem for rows in self.dangling),
            *(
                f"{name!r} cannot be looked at to the end: {why}."
                for name, why in self.errors.items()
            ),
        ]


def check(
    shards: Iterable[Shard] | None = None,
    *,
    timeout: float = PATIENCE,
    sample: int | None = SAMPLE,
    sizes: bool = True,
) -> HealthReport:
    """Check shards for every known problem. Changes nothing.

    The nodes are queried in parallel. Cost:

    - the cost of :func:`status`;
    - one query per 500 shards of a group with text keys;
    - two round trips for the schema of each shard;
    - the statements of :meth:`RowScan.read` and :meth:`RelationScan.read`.

    Memory: a small record for each shard, and each distinct schema once.

    :param shards: the shards to check; by default all.
    :param timeout: seconds to wait for the first answer of a node.
    :param sample: number of rows to check in each table of each shard; 0 for no row, None for all.
    :param sizes: whether to read the sizes of shards.
    """
    fleet = status(shards, timeout=timeout, sizes=sizes)
    alive_nodes = {node.name: node for node in fleet.nodes if node.error is None}

    def read(name: str, alive: Alive) -> tuple[list[InexactKey], Schemas, RowScan, RelationScan]:
        inexact: list[InexactKey] = []
        schemas, rows, relations = Schemas(), RowScan(sample), RelationScan(sample)
        with node_connection(name) as wrapper:
            for group in alive_nodes[name].groups:
                existing = list(_existing(group))
                inexact += inexact_keys(wrapper, [shard_status.shard for shard_status in existing])
                alive()
                schemas.read(existing, alive)
                if sample != 0:
                    # Skip shards that lack migrations. Their tables may differ from the models, so
                    # the statements would fail.
                    current = [
                        shard_status.shard
                        for shard_status in existing
                        if shard_status.state == "current"
                    ]
                    rows.read(wrapper, current, alive)
                    relations.read(wrapper, current, alive)
        return inexact, schemas, rows, relations

    inexact: list[InexactKey] = []
    schemas, rows, relations = Schemas(), RowScan(sample), RelationScan(sample)
    errors = {}
    for name, outcome in ask_nodes(alive_nodes, read, patience=timeout).items():
        if isinstance(outcome, Exception):
            errors[name] = error_line(outcome)
        else:
            inexact += outcome[0]
            schemas.add(outcome[1])
            rows.add(outcome[2])
            relations.add(outcome[3])
    return HealthReport(
        fleet,
        tuple(inexact_columns(inexact)),
        tuple(schemas.drifts()),
        tuple(sorted(schemas.foreign_ids, key=lambda ids: (ids.shard.alias, ids.source))),
        tuple(rows.misplaced),
        tuple(relations.cross_key),
        tuple(relations.dangling),
        rows.looked_at,
        {**errors, **rows.errors, **relations.errors, **schemas.errors},
    )


def _existing(group: GroupOnNode) -> Iterator[ShardStatus]:
    return (
        shard_status for shard_status in group.shards if shard_status.state in ("current", "behind")
    )


def _drift_problem(drift: Drift) -> str:
    advice = (
        "Somebody has changed one of them by hand: change it back"
        f" ('manage.py shards sql {drift.shard.alias}')."
    )
    if all(each.startswith(f"function '{FUNCTION_PREFIX}") for each in drift.differences):
        advice = (
            "Only functions that make ids differ, as those of two versions of sharded_orm may:"
            f" 'manage.py migrate --database {drift.shard.alias}' replaces those of this shard, and"
            " with the alias of a sibling those of the sibling."
        )
    shown = "; ".join(drift.differences[:5])
    more = f"; and {len(drift.differences) - 5} more" if len(drift.differences) > 5 else ""
    return (
        f"Shard {drift.shard.alias!r} does not look like {drift.siblings} sibling"
        f"{'s' if drift.siblings > 1 else ''} of the same migrations, {drift.sibling.alias!r} for one:"
        f" {shown}{more}. {advice}"
    )


def _misplaced_problem(rows: Misplaced) -> str:
    example = rows.examples[0]
    if example.home is not None:
        where = f"belongs on {example.home!r}: {example.why}"
    else:
        where = f"has no shard: {example.why}"
    return (
        f"{rows.rows} row{'s' if rows.rows > 1 else ''} of {rows.model} on {rows.shard.alias!r} with"
        f" {rows.keys} key{'s' if rows.keys > 1 else ''} that no query looks for there;"
        f" {rows.key_name}={example.key!r} {where}. Copy them to where they belong and delete them"
        " here, or correct what places the key."
    )
