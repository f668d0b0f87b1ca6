"""Makes the plan of a recorded query from examples: queries of the same shape with made-up values.

A plan is SQL that was compiled once for all queries that differ only in their values.
"""

from __future__ import annotations

from typing import Any

from django.db.models.sql import Query

from sharded_orm.models.plans.plan import GET, ROWS, Plan, compile_plan
from sharded_orm.models.plans.selection import EVERYTHING
from sharded_orm.models.plans.shapes import Recording, logger
from sharded_orm.models.querysets.route import has_one_table

#: The kind of examples for an UPDATE.
UPDATE = "update"


def learn(kind: str, key: Any, recording: Recording, queryset_class: Any, connection: Any) -> None:
    """Make the plan of a recorded query. Called after Django has run the query on ``connection``.

    :param key: the key of the plan in the shape's plans.
    """
    shape = recording.shape
    plan: Plan | None = None
    try:
        examples = examples_of(kind, recording, queryset_class)
        if examples:
            plan = compile_plan(kind, shape, examples, connection)
    except Exception:
        # A field or the backend refuses the values of the example query. The read itself has
        # succeeded, so ignore the error. Django compiles such reads each time.
        logger.debug("%s has no plan", shape, exc_info=True)
    logger.debug("%s of %s: %s", kind, shape, "left to Django" if plan is None else "planned")
    shape.plans[key] = plan


def examples_of(
    kind: str, recording: Recording, queryset_class: Any
) -> list[tuple[Query, Recording]]:
    """Return queries of the shape of ``recording`` with made-up values, and their recordings.

    Return an empty list if the queries of the shape can have no plan.

    :param kind: the kind of the read, or :data:`UPDATE`.
    """
    shape, examples = recording.shape, []
    # Three lists of different lengths show how the SQL depends on the length.
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
