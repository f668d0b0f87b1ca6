"""The shapes of queries that a process keeps, and how often their plans were used.

A shape is kept with its plans, the SQL that was compiled once for all queries of the shape. The
shapes of a model form a tree, whose root is the shape of all its rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakSet

if TYPE_CHECKING:
    from sharded_orm.models.plans.shapes import Shape

logger = logging.getLogger("sharded_orm.plans")

#: The maximum number of shapes that a process keeps, without the roots of the trees.
MAX_SHAPES = 10_000

_Children: TypeAlias = "dict[tuple[Any, ...], Shape | None]"

_lock = threading.Lock()
_roots: list[Shape] = []
# A queryset that a program holds, such as that of a class of views, may still have a shape that was
# dropped. Shapes below it are kept and dropped like any others.
_dropped: WeakSet[Shape] = WeakSet()
_count = 0
_has_warned = False


def add_root(shape: Shape) -> None:
    """Keep ``shape``, the root of a tree of shapes."""
    _roots.append(shape)


def forget() -> None:
    """Forget all trees of shapes, because their roots are no longer used."""
    global _roots, _count, _has_warned
    _roots, _count, _has_warned = [], 0, False


def has_room() -> bool:
    """Return whether one more shape can be kept, and if so, count it.

    If :data:`MAX_SHAPES` are kept, drop those whose plans were not used since shapes were dropped
    last. So a process with many shapes keeps those that it uses. The first time, log a warning.
    Thread-safe. Threads that add shapes at the same moment may be counted once.
    """
    global _count
    if _count >= MAX_SHAPES and not _make_room():
        return False
    _count += 1
    return True


def _make_room() -> bool:
    global _count, _has_warned
    if not _has_warned:
        _has_warned = True
        # Do not hold the lock, because a log handler may query the database, and so need room.
        logger.warning(
            "Queries of %d shapes were recorded, so those that are not in use are dropped. Probably"
            " a program takes the names of conditions from data.",
            MAX_SHAPES,
        )
    # Do not wait if another thread is making room. In a forked process, that thread may not exist.
    if not _lock.acquire(blocking=False):
        return False
    try:
        if _count >= MAX_SHAPES:
            _count = _drop_unused()
        return _count < MAX_SHAPES
    finally:
        _lock.release()


def _drop_unused() -> int:
    """Drop the shapes that are not in use. Return how many are left.

    A shape is in use if a plan has read a query of it since the last call of this function, or a
    query of a shape below it.
    """
    # List each shape before those below it. Do not recurse, because a program may filter a queryset
    # a thousand times. An item has the new children of the shape's parent, the call that leads to
    # the shape, the shape, and its own new children.
    found: list[tuple[_Children | None, tuple[Any, ...], Shape, _Children]]
    found = [(None, (), shape, {}) for shape in (*_roots, *_dropped)]
    for _, _, shape, children in found:
        found += [
            (children, call, child, {})
            for call, child in list(shape.children.items())
            if child is not None
        ]
    count = 0
    for siblings, call, shape, children in reversed(found):
        uses = sum([plan.uses for plan in list(shape.plans.values()) if plan is not None])
        if siblings is not None:
            if children or uses != shape.former_uses:
                siblings[call] = shape
                count += 1
            else:
                _dropped.add(shape)
        shape.former_uses = uses
        # Assign new containers instead of emptying the present ones, which other threads may be
        # reading. What such a thread adds to an old container is lost, so Django makes it again.
        shape.children = children
        # The plans of updates do not count their uses, so drop them all. The next two updates of a
        # kind make them anew.
        shape.updates, shape.seen = {}, set()
    return count


class PlanUse(NamedTuple):
    """How often a process has used the plan of one kind of read.

    :param reads: the kind of read and the shape of the queries, for people.
    :param uses: how often the plan was used; None if Django compiles each of these queries.
    """

    reads: str
    uses: int | None


def plan_uses() -> list[PlanUse]:
    """Return the shapes of queries that this process has read at least twice, most used first.

    The last ones are those that have no plan, so Django compiles each of their queries. Shapes that
    were dropped to make room for others are missing. Sends nothing. Thread-safe.
    """
    found = [
        PlanUse(
            f"{key if isinstance(key, str) else key[0]} of {shape}",
            None if plan is None else plan.uses,
        )
        for shape in _all_shapes()
        for key, plan in list(shape.plans.items())
    ]
    return sorted(found, key=lambda use: -1 if use.uses is None else use.uses, reverse=True)


def _all_shapes() -> Iterator[Shape]:
    unvisited = [*_roots]
    while unvisited:
        shape = unvisited.pop()
        yield shape
        unvisited += [child for child in list(shape.children.values()) if child is not None]
