"""Makes the plan of a recorded query from examples: queries of the same form with made-up values.

A plan is SQL that was compiled once for all queries that differ only in their values.
"""

from __future__ import annotations

from typing import Any

from django.db.models.sql import Query

from sharded_orm.models.cached.queryset import CachedQuerySet
from sharded_orm.models.cached.request_plan import request_plan
from sharded_orm.models.plans.declarations import Declarations
from sharded_orm.models.plans.plan import GET, ROWS, Plan, compile_plan
from sharded_orm.models.plans.selection import EVERYTHING
from sharded_orm.models.plans.shapes import Recording, plan_of
from sharded_orm.models.querysets.route import has_one_table

#: The ``kind`` of a query that is not a read but an UPDATE.
UPDATE = "update"


def learn(kind: str, key: Any, recording: Recording, queryset_class: Any, connection: Any) -> None:
    """Make the plan of the query in ``recording``, and store it in ``recording.shape.plans[key]``.

    A plan is SQL for all queries of the same form. Called after Django has run the query on
    ``connection``.
    """
    shape = recording.shape

    def make() -> Plan | None:
        declarations = Declarations(shape)
        examples = examples_of(kind, recording, queryset_class)
        if not examples:
            return None
        cache = None
        if issubclass(queryset_class, CachedQuerySet):
            cache = request_plan(kind, queryset_class._new_query(shape.model), recording)
        return compile_plan(kind, shape, examples, declarations, connection, cache)

    shape.plans[key] = plan_of(f"{kind} of {shape}", make)


def examples_of(
    kind: str, recording: Recording, queryset_class: Any
) -> list[tuple[Query, Recording]]:
    """Return queries like that of ``recording``, with made-up values, and their recordings.

    Return an empty list if the query can have no plan (SQL that is compiled once for all queries of
    the same form).

    :param kind: the kind of the read, or :data:`UPDATE`.
    """
    shape, examples = recording.shape, []
    # If a condition has a list (``__in``), make examples with one, two and three values. From
    # these, the caller sees how the SQL depends on the length of the list.
    for length in (1, 2, 3) if shape.has_list else (1,):
        example = recording.example(length)
        if example is None:
            return []
        query = queryset_class._new_query(shape.model)
        example.replay(query, selects=False)
        if not has_one_table(query, ordered=kind == ROWS):
            return []
        if not queryset_class._is_routed(kind, example):
            return []
        if kind in (ROWS, GET) and shape.selection is not EVERYTHING:
            shape.selection.apply(query)
        examples.append((query, example))
    return examples
