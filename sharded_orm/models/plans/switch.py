"""Switches plans (SQL that was compiled once) off, for a block of code or by the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sharded_orm import runtime

_are_plans_on: ContextVar[bool] = ContextVar("sharded_orm_plans", default=True)


@contextmanager
def without_plans() -> Iterator[None]:
    """Within the ``with`` block, Django compiles each query, and no plan is used.

    This applies only to the current context (:mod:`contextvars`).
    """
    token = _are_plans_on.set(False)
    try:
        yield
    finally:
        _are_plans_on.reset(token)


#: Returns False inside of a :func:`without_plans` block, and True otherwise. Each call of a
#: queryset calls it. So it is the method get() of the context variable itself, because a Python
#: function around it would be slower.
are_plans_on: Callable[[], bool] = _are_plans_on.get


def are_write_plans_on() -> bool:
    """Return whether rows can be written with plans now.

    True if the settings allow it, and if the calling code is not in a :func:`without_plans` block.
    """
    return _are_plans_on.get() and runtime.config().write_plans
