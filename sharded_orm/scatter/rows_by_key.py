"""Reads rows by their primary keys, if the caller knows the shard of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import connections

from sharded_orm.scatter.compile import CompileOptions, Template
from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.plan import Target, make_plan

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.comparison import Row
    from sharded_orm.topology.model import Shard

_TEMPLATES = "_sharded_orm_templates_by_key"


def fetch_by_key(query: Query, pks: Mapping[Shard, Sequence[Any]]) -> Iterator[tuple[str, Row]]:
    """Yield pairs of a shard's alias and a row from the driver, in no particular order.

    Each thread compiles the query once for each node (a database server). Costs one statement per
    node. The nodes are queried in parallel.

    :param query: the query of all rows of a model, as a manager of the library makes it.
    :param pks: the primary keys to read from each shard.
    :raises ScatterError: a shard does not answer.
    """
    failures = Failures(len(pks))
    targets = [Target(shard, query) for shard in pks]
    plan = make_plan(
        targets,
        CompileOptions(by_pk=True),
        failures,
        pks=dict(enumerate(pks.values())),
        templates=_templates(query, targets[0].shard.group),
    )
    if plan.template is None:
        return
    width, marker = plan.template.width, len(plan.template.columns)
    aliases = [shard.alias for shard in pks]
    for row in Executor(plan, failures, 2000).chained():
        yield aliases[row[marker]], row[:width]
    failures.finish()


def _templates(query: Query, group: str) -> dict[str, Template]:
    """Return the templates with which this thread reads rows of a model by key, by node."""
    # They are kept on the thread's connection object of the group, because a template has a
    # connection object of a shard, which belongs to the thread.
    meta = query.get_meta()
    known = connections[group].__dict__.setdefault(_TEMPLATES, {})
    templates: dict[str, Template] = known.setdefault((meta.model, meta.db_table), {})
    return templates
