"""What processes do with each index: nothing, write it, or write and read it.

Processes remember a state for :data:`REMEMBERED` seconds. So whoever needs that all processes know a new state
waits for that time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.utils import timezone

from sharded_orm.contrib.entities.exceptions import IndexNotServed
from sharded_orm.contrib.entities.models import IndexState

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index

WRITTEN: Final = "written"
"""Writers write rows, but old entities may have none. An index is in this state until it is built."""
SERVED: Final = "served"
"""All entities have their rows, so reads may rely on the index."""
DROPPED: Final = "dropped"
"""Nobody writes rows, and there may be any."""

#: Seconds for which a process relies on a state that it has read.
REMEMBERED = 5.0
_remembered: dict[str, tuple[str, float]] = {}


def state_of(index: Index) -> str:
    """Return the state of ``index``. One query of the global database, every few seconds."""
    known = _remembered.get(index.label)
    if known is not None and time.monotonic() - known[1] < REMEMBERED:
        return known[0]
    return read_state(index)


def read_state(index: Index) -> str:
    """Return the state of ``index`` as it is now. One query of the global database."""
    asked_at = time.monotonic()
    states = IndexState.objects.using(DEFAULT_DB_ALIAS).filter(index=index.label)
    state = states.values_list("state", flat=True).first() or WRITTEN
    _remembered[index.label] = (state, asked_at)
    return state


def is_written(index: Index) -> bool:
    """Whether writers write rows of ``index``. If the global database is down, they do."""
    try:
        return state_of(index) != DROPPED
    except Error:
        known = _remembered.get(index.label)
        return known is None or known[0] != DROPPED


def require_served(index: Index) -> None:
    """Raise an error unless reads may rely on ``index``.

    :raises IndexNotServed: they may not.
    """
    state = state_of(index)
    if state != SERVED:
        raise IndexNotServed(
            f"Index {index.label!r} is {state!r}, so reads may not rely on it yet. When every process that"
            f" puts entities has its declaration, run 'manage.py entities index build {index.label}'."
        )


def set_state(index: Index, state: str) -> None:
    """Store the state of ``index``. Other processes learn of it within :data:`REMEMBERED` seconds."""
    IndexState.objects.using(DEFAULT_DB_ALIAS).update_or_create(
        index=index.label, defaults={"state": state, "since": timezone.now()}
    )
    _remembered[index.label] = (state, time.monotonic())


def after_migrate(*, using: str, **kwargs: Any) -> None:
    """Serve all indexes in test databases, which are new.

    A receiver of ``post_migrate``, which Django also sends after a flush.
    """
    from sharded_orm.contrib.entities.store import stores

    if using == DEFAULT_DB_ALIAS and connections[using].settings_dict["NAME"] != _NAME:
        for store in stores.values():
            for index in store.indexes:
                set_state(index, SERVED)


_NAME = settings.DATABASES[DEFAULT_DB_ALIAS]["NAME"]
