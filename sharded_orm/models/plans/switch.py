"""Switches plans off: for a block of code, or by the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sharded_orm import runtime

_are_plans_on: ContextVar[bool] = ContextVar("sharded_orm_plans", default=True)


@contextmanager
def without_plans() -> Iterator[None]:
    """Within the ``with`` block, let Django compile each query.

    This applies only to the current context (:mod:`contextvars`).
    """
    token = _are_plans_on.set(False)
    try:
        yield
    finally:
        _are_plans_on.reset(token)


#: Returns whether the calling code runs outside of :func:`without_plans`. This is the method get()
#: of the variable itself, because a function around it would cost time in each call of a queryset.
are_plans_on: Callable[[], bool] = _are_plans_on.get


def are_write_plans_on() -> bool:
    """Whether plans may write rows: outside of :func:`without_plans`, if the settings allow it."""
    return _are_plans_on.get() and runtime.config().write_plans
