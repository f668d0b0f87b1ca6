"""The migration plan for all shards that have applied the same migrations.

A :class:`MigrationPlan` is made once per set of applied migrations, as ``manage.py migrate`` would
make it. All shards with that set share the plan, and so do the threads that migrate these shards.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from django.db import router
from django.db.migrations.migration import Migration
from django.db.migrations.operations import RunPython, RunSQL, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import OperationWriter

from sharded_orm.backends.snapshot import applied_digest

#: App label and name of a migration.
Key = tuple[str, str]

# Modules with operations of Django that send SQL only through the schema editor. Their SQL is
# recorded once and sent to every shard. A subclass in another module may do more than send SQL. So
# a subclass runs as Python code on each shard.
_SCHEMA_OPERATIONS = frozenset(
    f"django.db.migrations.operations.{module}" for module in ("fields", "models")
)
# Operations of django.contrib.postgres that send SQL only through the schema editor. They are named
# as text, because the module is not imported here. CreateExtension is left out: its SQL depends on
# the extensions that the database has already. Extensions are not part of a shard's schema, so two
# shards with the same schema may need different SQL.
_POSTGRESQL = "django.contrib.postgres.operations"
_POSTGRESQL_OPERATIONS = frozenset(
    {
        "AddIndexConcurrently",
        "RemoveIndexConcurrently",
        "AddConstraintNotValid",
        "ValidateConstraint",
        "CreateCollation",
        "RemoveCollation",
    }
)


@dataclass(frozen=True)
class Piece:
    """An operation, the project state before it runs, and the project state after it has run.

    If the migration is undone, ``from_state`` is the state with the operation applied, and
    ``to_state`` is the state without it.
    """

    operation: Operation
    from_state: ProjectState
    to_state: ProjectState


@dataclass(frozen=True)
class Unit:
    """One migration in one direction, forwards or backwards.

    :param alias: the alias of any shard of the group. With it, the database routers are asked
        whether an operation runs on shards. Their answer is the same for all shards of the group.
    :param records: the rows of ``django_migrations`` that the unit adds (forwards) or deletes
        (backwards).
    """

    migration: Migration
    backwards: bool
    alias: str
    records: tuple[Key, ...]

    @property
    def key(self) -> Key:
        return self.migration.app_label, self.migration.name

    def __str__(self) -> str:
        return f"{self.migration.app_label}.{self.migration.name}"

    @cached_property
    def operations(self) -> list[Operation]:
        """The operations in the order in which they run.

        Each ``SeparateDatabaseAndState`` is replaced by its database operations.
        """
        flat = [inner for operation in self.migration.operations for inner in _inner(operation)]
        return flat[::-1] if self.backwards else flat

    @cached_property
    def is_mixed(self) -> bool:
        """Whether the migration has an operation that must run on each shard itself.

        The SQL of such an operation cannot be recorded once for all shards.
        """
        return any(map(self.runs_per_shard, range(len(self.operations))))

    def runs_per_shard(self, number: int) -> bool:
        """Whether an operation must run on each shard itself, because its SQL cannot be recorded.

        :param number: the index of the operation in :attr:`operations`.
        """
        operation = self.operations[number]
        if type(operation) in (RunPython, RunSQL):
            # RunPython and RunSQL do nothing if the database router refuses the app, as it does for
            # apps without tables on shards. Then they need not be called on each shard.
            hints: dict[str, Any] = operation.hints  # type: ignore[attr-defined]  # RunPython and RunSQL have ``hints``
            return router.allow_migrate(self.alias, self.migration.app_label, **hints)
        kind = type(operation)
        return kind.__module__ not in _SCHEMA_OPERATIONS and (
            kind.__module__ != _POSTGRESQL or kind.__name__ not in _POSTGRESQL_OPERATIONS
        )

    def is_atomic(self, number: int) -> bool:
        """Whether an operation runs in a transaction of its own.

        The answer is used only if the migration as a whole does not run in one transaction.

        :param number: the index of the operation in :attr:`operations`.
        """
        operation = self.operations[number]
        if any(operation is listed for listed in self.migration.operations):
            # Use the same condition as Migration.apply().
            return bool(
                operation.atomic or (self.migration.atomic and operation.atomic is not False)
            )
        return bool(operation.atomic)

    def outline(self, count: int) -> str:
        """Return a digest (a short text) of the first ``count`` operations.

        A process that continues a migration compares the digest with the one in the checkpoint. If
        they differ, somebody has edited the migration meanwhile. For an operation that runs on each
        shard, the digest covers only the class name and the description.
        """
        contents = "\n".join(self._contents[:count])
        return hashlib.sha256(contents.encode()).hexdigest()[:16]

    @cached_property
    def _contents(self) -> list[str]:
        return [
            f"{type(operation).__qualname__}: {operation.describe()}"
            if self.runs_per_shard(number)
            else _content(operation)
            for number, operation in enumerate(self.operations)
        ]

    def pieces(self, state: ProjectState) -> Iterator[Piece]:
        """Yield each operation with the project states before and after it.

        The order and the states are those of Migration.apply() or, backwards, of unapply().

        :param state: the project state in which the migration is not applied. The method changes
            this object.
        """
        label = self.migration.app_label
        steps = []
        for operation in self.migration.operations:
            old = state.clone()
            if self.backwards:
                state = state.clone()
            operation.state_forwards(label, state)
            if self.backwards:
                steps.append((operation, old, state))
            else:
                yield from self._flat(operation, old, state)
        for operation, old, new in reversed(steps):
            yield from self._flat(operation, old, new)

    def _flat(self, operation: Operation, old: ProjectState, new: ProjectState) -> Iterator[Piece]:
        if type(operation) is not SeparateDatabaseAndState:
            yield Piece(operation, new, old) if self.backwards else Piece(operation, old, new)
            return
        # Compute the states as SeparateDatabaseAndState.database_forwards() and …_backwards() do.
        states = [old]
        for inner in operation.database_operations:
            state = states[-1].clone()
            inner.state_forwards(self.migration.app_label, state)
            states.append(state)
        pairs = list(zip(operation.database_operations, states, states[1:], strict=False))
        for inner, before, after in reversed(pairs) if self.backwards else pairs:
            yield from self._flat(inner, before, after)


def _content(operation: Operation) -> str:
    try:
        return OperationWriter(operation, indentation=0).serialize()[0]
    except ValueError:  # An argument, such as a lambda, cannot be stored: omit all arguments.
        return f"{type(operation).__qualname__}: {operation.describe()}"


def _inner(operation: Operation) -> Iterator[Operation]:
    if type(operation) is not SeparateDatabaseAndState:
        yield operation
        return
    for inner in operation.database_operations:
        yield from _inner(inner)


@dataclass(frozen=True)
class MigrationPlan:
    """The units (migrations with a direction) that lead from ``applied`` to the target. Thread-safe."""

    #: The migrations that ``django_migrations`` records.
    applied: frozenset[Key]
    #: The migrations that Django regards as applied. These are the migrations in ``applied``, and
    #: squashed migrations that are not recorded themselves but replace only applied migrations.
    done: frozenset[Key]
    units: Sequence[Unit]
    #: Squashed migrations that are recorded as applied at the end of the plan, because then all
    #: migrations that they replace are applied.
    replacements: Sequence[Key]
    # The project state before the plan's first migration.
    _base: ProjectState
    # All migrations, in the order in which an empty database would be migrated. If the plan runs
    # backwards, project states are computed by going through this list.
    _full: Sequence[Migration]
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _per_shard_pieces: dict[tuple[int, int], Piece] = field(default_factory=dict)

    @property
    def backwards(self) -> bool:
        return bool(self.units) and self.units[0].backwards

    @property
    def is_empty(self) -> bool:
        return not self.units and not self.replacements

    @cached_property
    def digest(self) -> str:
        return applied_digest(self.applied)

    def state_before(self, number: int) -> ProjectState:
        """Return the project state in which the migration of a unit is not applied.

        If the unit runs forwards, this is the state before it; if it runs backwards, the state
        after it. The caller may change the returned object.

        :param number: the index of the unit in the plan. If the plan runs forwards, the number of
            units is allowed too: it gives the state at the end of the plan.
        """
        if not self.backwards:
            state = self._base.clone()
            for unit in self.units[:number]:
                unit.migration.mutate_state(state, preserve=False)
            return state
        # Compute the state as MigrationExecutor._migrate_all_backwards() does.
        last = self.units[number].migration
        state = ProjectState(real_apps=self._base.real_apps)
        for migration in self._full:
            if migration == last:
                break
            if (migration.app_label, migration.name) in self.done:
                migration.mutate_state(state, preserve=False)
        return state

    def per_shard_piece(self, unit: int, operation: int) -> Piece:
        """Return an operation that runs on each shard, with the project states before and after it.

        The models of these states are rendered once for all shards, because rendering is slow.

        :param unit: the index in the plan of the unit (a migration in one direction).
        :param operation: the index of the operation in the unit.
        """
        with self._lock:
            shared_piece = self._per_shard_pieces.get((unit, operation))
            if shared_piece is None:
                pieces = self.units[unit].pieces(self._render(self.state_before(unit)))
                for number, piece in enumerate(pieces):
                    if number == operation:
                        for state in (piece.from_state, piece.to_state):
                            self._render(state)
                        # Leave the loop now. The generator pieces() would change the states of
                        # ``piece`` in its next step.
                        shared_piece = self._per_shard_pieces[unit, operation] = piece
                        break
            assert shared_piece is not None
            return shared_piece

    @cached_property
    def _models_before(self) -> Any:
        return self._render(self._base.clone()).apps

    @cached_property
    def _models_after(self) -> Any:
        if self.backwards:
            gone = {key for unit in self.units for key in unit.records}
            state = ProjectState(real_apps=self._base.real_apps)
            for migration in self._full:
                if (migration.app_label, migration.name) in self.done - gone:
                    migration.mutate_state(state, preserve=False)
        else:
            state = self.state_before(len(self.units))
        return self._render(state).apps

    def models(self, *, after: bool) -> Any:
        """Return the historical models for a signal: receivers get them as the argument ``apps``.

        :param after: True for the signal ``post_migrate``, False for ``pre_migrate``.
        """
        with self._lock:
            return self._models_after if after else self._models_before

    def for_signals(self) -> list[tuple[Migration, bool]]:
        """Return the argument ``plan`` of ``pre_migrate`` and ``post_migrate``, with copied
        migrations.

        A receiver may add operations to a migration; for example, a receiver of ``contenttypes``
        does. All shards share the plan. Without the copies, the receiver would add its operations
        to the shared plan again for each shard.
        """
        plan = []
        for unit in self.units:
            migration = copy.copy(unit.migration)
            migration.operations = list(migration.operations)  # type: ignore[misc]  # Django, too, replaces the list of operations
            plan.append((migration, unit.backwards))
        return plan

    @staticmethod
    def _render(state: ProjectState) -> ProjectState:
        state.clear_delayed_apps_cache()
        _ = state.apps
        # The models of this state were rendered once for all threads. In each thread, RunPython
        # calls clear_delayed_apps_cache(), which would discard the models. With ``is_delayed`` set
        # to False, clear_delayed_apps_cache() does nothing.
        state.is_delayed = False
        return state
