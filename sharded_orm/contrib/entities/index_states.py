"""The state of each index: whether processes write its rows, and whether they read them.

A process remembers a state for :data:`REMEMBERED` seconds. So after a change, a caller waits for
that time if it must be sure that all processes use the new state.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.db.migrations import CreateModel, Migration
from django.db.models import DurationField, ExpressionWrapper, F

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.contrib.entities.exceptions import IndexNotServed
from sharded_orm.contrib.entities.models import IndexState
from sharded_orm.database_clock import DatabaseClock

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index

WRITTEN: Final = "written"
"""Writers write rows, but old entities may have none. An index is in this state until it is built."""
SERVED: Final = "served"
"""All entities have their rows, so reads may rely on the index."""
DROPPED: Final = "dropped"
"""Nobody writes rows, and there may be any."""

_MEANINGS: Final = {WRITTEN: "written but not built", DROPPED: "dropped"}

#: Seconds for which a process uses the state of an index after it has read the state from the
#: database.
REMEMBERED = 5.0
_remembered: dict[str, tuple[str, float]] = {}
_connections = AutonomousConnections()


def state_of(index: Index) -> str:
    """Return the state of ``index``. A process usually queries the global database for it at most
    once in :data:`REMEMBERED` seconds.
    """
    known = _remembered.get(index.label)
    if known is not None and time.monotonic() - known[1] < REMEMBERED:
        return known[0]
    return read_state(index)


def read_state(index: Index) -> str:
    """Return the state of ``index`` as it is now. Costs one query to the global database.

    The query runs on a separate connection. On the caller's connection, an open transaction might
    see only the state that was stored when the transaction began.
    """
    asked_at = time.monotonic()
    connection, is_current = _connections.get(DEFAULT_DB_ALIAS)
    states = IndexState.objects.filter(index=index.label).values_list("state", "declaration")
    rows = list(states.query.get_compiler(connection=connection).results_iter())
    state, declaration = rows[0] if rows else (WRITTEN, "")
    # An empty declaration counts as unchanged. It was stored by a version of this library that did
    # not store declarations yet.
    if state == SERVED and declaration not in ("", index.declaration):
        # The declaration of the index has changed since it was built. Its rows may be missing or on
        # other shards, so writers write rows, but reads do not use the index.
        state = WRITTEN
    if is_current:
        _remembered[index.label] = (state, asked_at)
    return str(state)


def age(index: Index) -> float | None:
    """Return for how many seconds ``index`` has had its state; None if no state is stored."""
    states = IndexState.objects.using(DEFAULT_DB_ALIAS).filter(index=index.label)
    since = ExpressionWrapper(DatabaseClock() - F("since"), output_field=DurationField())
    age: timedelta | None = states.values_list(since, flat=True).first()
    return None if age is None else age.total_seconds()


def is_written(index: Index) -> bool:
    """Whether writers must write rows of ``index``.

    If the global database does not answer, the last state that this process has read decides. If
    the process has not read a state yet, the answer is True.
    """
    try:
        return state_of(index) != DROPPED
    except Error:
        known = _remembered.get(index.label)
        return known is None or known[0] != DROPPED


def require_served(index: Index) -> None:
    """Raise an error if reads cannot rely on ``index``, for example because it is not built yet.

    :raises IndexNotServed: the state of the index is not :data:`SERVED`.
    """
    state = state_of(index)
    if state != SERVED:
        raise IndexNotServed(
            f"Index {index.label!r} is {_MEANINGS.get(state, repr(state))}, so reads may not rely on it yet."
            " When every process that puts entities has its declaration, run"
            f" 'manage.py entities index build {index.label}'."
        )


def set_state(index: Index, state: str) -> None:
    """Store the state of ``index``. Other processes learn of it within :data:`REMEMBERED` seconds."""
    # Do not use update_or_create(), which reads before it writes. On SQLite, the write then fails
    # if another connection has written in between.
    IndexState(
        index=index.label, state=state, since=DatabaseClock(), declaration=index.declaration
    ).save(using=DEFAULT_DB_ALIAS)
    _remembered[index.label] = (state, time.monotonic())


def before_migrate(*, using: str, plan: Iterable[tuple[Migration, bool]], **kwargs: Any) -> None:
    """Stop reads of indexes whose tables are about to be created.

    The new table of an index is empty, so it lacks the rows of the entities that are stored
    already. Reads use the index again after ``entities index build`` has written these rows. A
    receiver of ``pre_migrate``.
    """
    from sharded_orm.contrib.entities.store import stores

    created = {
        f"{migration.app_label}.{operation.name_lower}"
        for migration, is_backwards in plan
        for operation in migration.operations
        if isinstance(operation, CreateModel) and not is_backwards
    }
    for store in stores.values():
        # If the table of the entities is created as well, for example on a new shard, it has no
        # entities yet. So no index row is missing, and reads can continue to use the index.
        if store.model._meta.label_lower not in created:
            for index in store.indexes:
                # The migration plan of each database contains all migrations. But a migration
                # creates the table only on the databases that the router allows.
                if index.model._meta.label_lower in created and router.allow_migrate_model(
                    using, index.model
                ):
                    withdraw(index)


def after_migrate(*, using: str, **kwargs: Any) -> None:
    """In a test database, let reads use all indexes. A test database begins without entities, so no
    index row can be missing.

    A receiver of ``post_migrate``, which Django also sends after a flush.
    """
    from sharded_orm.contrib.entities.store import stores

    if using == DEFAULT_DB_ALIAS and connections[using].settings_dict["NAME"] != _NAME:
        for store in stores.values():
            for index in store.indexes:
                set_state(index, SERVED)


def withdraw(index: Index) -> None:
    """Stop reads from using ``index`` until the index is built again. Writers still write its rows.

    Does nothing if the index is not in use by reads.
    """
    states = IndexState.objects.using(DEFAULT_DB_ALIAS)
    states.filter(index=index.label, state=SERVED).update(state=WRITTEN, since=DatabaseClock())
    _remembered.pop(index.label, None)


_NAME = settings.DATABASES[DEFAULT_DB_ALIAS]["NAME"]
