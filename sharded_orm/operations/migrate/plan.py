"""The plan for shards that have applied the same migrations: its units and operations.

A :class:`MigrationPlan` is made once per set of applied migrations, as ``manage.py migrate`` would
make it. All shards with that set share the plan, and so do the threads that migrate them.
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

# Modules of the operations whose SQL comes from the schema editor alone. A subclass elsewhere may
# do anything, and so does not count.
_SCHEMA_OPERATIONS = frozenset(
    f"django.db.migrations.operations.{module}" for module in ("fields", "models")
)


@dataclass(frozen=True)
class Piece:
    """An operation with the project states before and after it, in the direction of the plan."""

    operation: Operation
    from_state: ProjectState
    to_state: ProjectState


@dataclass(frozen=True)
class Unit:
    """One migration, in one direction.

    :param alias: the alias of any shard, for questions to routers. They answer alike for all shards
        of a group.
    """

    migration: Migration
    backwards: bool
    alias: str

    @property
    def key(self) -> Key:
        return self.migration.app_label, self.migration.name

    def __str__(self) -> str:
        return f"{self.migration.app_label}.{self.migration.name}"

    @cached_property
    def operations(self) -> list[Operation]:
        """The operations in running order; those in SeparateDatabaseAndState are listed singly."""
        flat = [inner for operation in self.migration.operations for inner in _inner(operation)]
        return flat[::-1] if self.backwards else flat

    @cached_property
    def is_mixed(self) -> bool:
        """Whether some operations must run on each shard, because their SQL cannot be recorded."""
        return any(map(self.runs_per_shard, range(len(self.operations))))

    def runs_per_shard(self, number: int) -> bool:
        """Whether operation ``number`` must run on each shard."""
        operation = self.operations[number]
        if type(operation) in (RunPython, RunSQL):
            # The operations ask the same themselves. Most belong to apps without tables on shards.
            hints: dict[str, Any] = operation.hints  # type: ignore[attr-defined]  # of these two
            return router.allow_migrate(self.alias, self.migration.app_label, **hints)
        return type(operation).__module__ not in _SCHEMA_OPERATIONS

    def is_atomic(self, number: int) -> bool:
        """Whether Django runs the operation in a transaction on databases without atomic DDL."""
        operation = self.operations[number]
        if any(operation is listed for listed in self.migration.operations):
            # As Migration.apply() does.
            return bool(
                operation.atomic or (self.migration.atomic and operation.atomic is not False)
            )
        return bool(operation.atomic)

    def outline(self, count: int) -> str:
        """A digest of the first ``count`` operations, which shows whether the migration has
        changed.

        For an operation that runs on each shard, only its name and description count.
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

    @property
    def records(self) -> list[Key]:
        """The rows of ``django_migrations`` that the unit adds or, backwards, deletes."""
        # As MigrationExecutor.record_migration() and unapply_migration().
        replaced = [(label, name) for label, name in self.migration.replaces]
        if self.backwards:
            return [*replaced, self.key]
        return replaced or [self.key]

    def pieces(self, state: ProjectState) -> Iterator[Piece]:
        """The operations with their states, as Migration.apply() and unapply() compute them.

        :param state: the state before the migration is applied; is changed.
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
        # As its database_forwards() and database_backwards().
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
    except ValueError:  # A default that cannot be serialized, such as a lambda.
        return f"{type(operation).__qualname__}: {operation.describe()}"


def _inner(operation: Operation) -> Iterator[Operation]:
    if type(operation) is not SeparateDatabaseAndState:
        yield operation
        return
    for inner in operation.database_operations:
        yield from _inner(inner)


@dataclass(frozen=True)
class MigrationPlan:
    """The units that lead from ``applied`` to the target. Thread-safe."""

    applied: frozenset[Key]
    #: The migrations that Django regards as applied: also squashed ones without a record.
    done: frozenset[Key]
    units: Sequence[Unit]
    #: Squashed migrations that count as applied after the plan.
    replacements: Sequence[Key]
    _base: ProjectState
    # All migrations in the order for an empty database, for the states on the way back.
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
        """The state in which unit ``number`` is not applied. The caller may change it."""
        if not self.backwards:
            state = self._base.clone()
            for unit in self.units[:number]:
                unit.migration.mutate_state(state, preserve=False)
            return state
        # As MigrationExecutor._migrate_all_backwards().
        last = self.units[number].migration
        state = ProjectState(real_apps=self._base.real_apps)
        for migration in self._full:
            if migration == last:
                break
            if (migration.app_label, migration.name) in self.done:
                migration.mutate_state(state, preserve=False)
        return state

    def per_shard_piece(self, unit: int, operation: int) -> Piece:
        """An operation that runs on each shard, with models rendered once for all shards."""
        with self._lock:
            shared_piece = self._per_shard_pieces.get((unit, operation))
            if shared_piece is None:
                pieces = self.units[unit].pieces(self._render(self.state_before(unit)))
                for number, piece in enumerate(pieces):
                    if number == operation:
                        for state in (piece.from_state, piece.to_state):
                            self._render(state)
                        # The loop ends here, because the next turn would change these states.
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
        """The historical models for ``pre_migrate`` or, with ``after``, for ``post_migrate``."""
        with self._lock:
            return self._models_after if after else self._models_before

    def for_signals(self) -> list[tuple[Migration, bool]]:
        """The plan as signals pass it on, with copies of the migrations.

        Receivers may add operations to a migration (``contenttypes`` does). Without copies they
        would add them once for each shard.
        """
        plan = []
        for unit in self.units:
            migration = copy.copy(unit.migration)
            migration.operations = list(migration.operations)  # type: ignore[misc]  # Django itself does so
            plan.append((migration, unit.backwards))
        return plan

    @staticmethod
    def _render(state: ProjectState) -> ProjectState:
        state.clear_delayed_apps_cache()
        _ = state.apps
        # The operations call clear_delayed_apps_cache() themselves, in every thread.
        state.is_delayed = False
        return state
