"""Reads rows by their primary keys, if the caller knows the shard of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharded_orm.scatter.compile import CompileOptions
from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.plan import Target, make_plan

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.comparison import Row
    from sharded_orm.topology.model import Shard


def fetch_by_key(query: Query, pks: Mapping[Shard, Sequence[Any]]) -> Iterator[tuple[str, Row]]:
    """Yield pairs of a shard's alias and a row from the driver, in no particular order.

    The query is compiled once for each node (a database server), and not for each shard. Costs one
    statement per node. The nodes are queried in parallel.

    :param query: a query of all rows, without conditions.
    :param pks: the primary keys to read from each shard.
    :raises ScatterError: a shard does not answer.
    """
    failures = Failures(len(pks))
    targets = [Target(shard, query) for shard in pks]
    plan = make_plan(
        targets, CompileOptions(by_pk=True), failures, pks=dict(enumerate(pks.values()))
    )
    if plan.template is None:
        return
    width, marker = plan.template.width, len(plan.template.columns)
    aliases = [shard.alias for shard in pks]
    for row in Executor(plan, failures, 2000).chained():
        yield aliases[row[marker]], row[:width]
    failures.finish()
