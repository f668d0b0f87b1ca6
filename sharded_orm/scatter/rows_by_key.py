"""Reads rows by their primary keys or another column, if the caller knows the shard of each value."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.plan import Target, make_plan, plan_by_key
from sharded_orm.scatter.template import CompileOptions, Template

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.comparison import Row
    from sharded_orm.topology.model import Shard

_TEMPLATES = "_sharded_orm_templates_by_key"
# Up to this number of keys, one thread may read all nodes; see ``few_rows`` of Executor.
_FEW = 1000


def fetch_by_key(
    query: Query, keys: Mapping[Shard, Sequence[Any]], *, field: Any = None
) -> Iterator[tuple[str, Row]]:
    """Yield pairs (alias of the shard, row from the driver), in no particular order.

    The arguments, costs and errors are those of :func:`fetch_parts_by_key`.
    """
    for _, aliases, rows in fetch_parts_by_key(query, keys, field=field):
        yield from zip(aliases, rows, strict=True)


def fetch_parts_by_key(
    query: Query, keys: Mapping[Shard, Sequence[Any]], *, field: Any = None
) -> Generator[tuple[str, list[str], list[Row]]]:
    """Yield the rows in parts. Each part is a tuple (name of the node, aliases, rows).

    ``aliases`` contains the alias of the shard of each row, so the two lists are equally long. The
    rows are tuples as the driver returns them, in no particular order. A node may have several
    parts.

    Each thread compiles the query once for each node (a database server). Costs one statement per
    node. The nodes are queried in parallel.

    :param query: the query of all rows of a model, as a manager of the library makes it. It may
        select only some of the fields.
    :param keys: the values of ``field`` to read from each shard, prepared for the database.
    :param field: a field of the model; None for its primary key.
    :raises ScatterError: a shard does not answer.
    """
    failures = Failures(len(keys))
    field = field or query.get_meta().pk
    templates = _templates(query, next(iter(keys)).group, field)
    plan = plan_by_key(keys, templates, failures) or make_plan(
        [Target(shard, query) for shard in keys],
        CompileOptions(by_key=field),
        failures,
        pks=dict(enumerate(keys.values())),
        templates=templates,
    )
    if plan.template is None:
        return
    width, marker = plan.template.width, len(plan.template.columns)
    alias_of = {index: shard.alias for index, shard in plan.shards.items()}.__getitem__
    # Use itemgetter, which is written in C, because these functions are called for each row.
    index_of, selected = itemgetter(marker), itemgetter(slice(width))
    few_rows = sum(map(len, keys.values())) <= _FEW
    for node, part in Executor(plan, failures, 2000, few_rows=few_rows).by_statement():
        rows = part if isinstance(part, list) else list(part)
        yield node, list(map(alias_of, map(index_of, rows))), list(map(selected, rows))
    failures.finish()


def _templates(query: Query, group: str, field: Any) -> dict[str, Template]:
    """Return this thread's templates of the query that reads a model's rows by ``field``.

    The result maps each node to its template, a compiled SELECT. It is empty at first, and the
    caller fills it.
    """
    # Store the templates (compiled SELECTs) on this thread's connection object of the group. Other
    # threads must not use them, because a template contains a connection object of this thread.
    meta = query.get_meta()
    known = connection_of(group).__dict__.setdefault(_TEMPLATES, {})
    templates: dict[str, Template] = known.setdefault(
        (meta.model, meta.db_table, query.values_select, field), {}
    )
    return templates
