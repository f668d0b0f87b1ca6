"""The models between migrations, which Django renders anew for each database that it migrates.

Before a process runs its first test with a database, it migrates each global database and a template
for each group: nine databases. Most of the processor time goes into the classes of models that the
migrations see, and these are the same for all databases. Here they are rendered for the first
database; for another one the same operations run with the classes of the first.

Only for databases without any applied migration, and not while tests run: the classes take memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.migration import Migration
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.transaction import atomic


@contextmanager
def rendered_once() -> Iterator[None]:
    """For the block, use the models of one new database for the other new ones of this process."""
    create: Any = MigrationExecutor._create_project_state  # type: ignore[attr-defined]
    migrate_all: Any = MigrationExecutor._migrate_all_forwards  # type: ignore[attr-defined]
    points = _Points()

    def create_project_state(
        self: MigrationExecutor, with_applied_migrations: bool = False
    ) -> ProjectState:
        state: ProjectState = create(self, with_applied_migrations)
        if state.models or not with_applied_migrations:
            return state
        return points.first(state).state.clone()

    def migrate_all_forwards(
        self: MigrationExecutor,
        state: ProjectState,
        plan: Sequence[tuple[Migration, bool]],
        full_plan: Sequence[tuple[Migration, bool]],
        fake: bool,
        fake_initial: bool,
    ) -> ProjectState:
        if state.models or fake or fake_initial:
            ended: ProjectState = migrate_all(self, state, plan, full_plan, fake, fake_initial)
            return ended
        point = points.first(state)
        wanted = {migration for migration, _ in plan}
        for migration, _ in full_plan:
            if migration in wanted:
                point = point.after(self, migration)
        return point.for_receivers()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MigrationExecutor, "_create_project_state", create_project_state)
        patch.setattr(MigrationExecutor, "_migrate_all_forwards", migrate_all_forwards)
        yield


class _Points:
    """The points before the first migration, by the models of the apps that have no migrations."""

    def __init__(self) -> None:
        self._points: dict[Any, _Point] = {}

    def first(self, state: ProjectState) -> _Point:
        labels = sorted(state.real_apps)
        key = tuple((label, *apps.get_app_config(label).get_models()) for label in labels)
        if key not in self._points:
            state.apps  # noqa: B018 (renders the models)
            self._points[key] = _Point(state.clone())
        return self._points[key]


class _Point:
    """A place in a chain of migrations; :attr:`state` is never changed."""

    def __init__(self, state: ProjectState) -> None:
        self.state = state
        self._next: dict[type[Migration], tuple[list[_Step], _Point]] = {}
        self._returned: ProjectState | None = None

    def after(self, executor: MigrationExecutor, migration: Migration) -> _Point:
        """Migrate the database of ``executor``, and return the point after the migration."""
        steps, point = self._next.get(type(migration), ([], None))
        # Receivers of pre_migrate add operations to some migrations.
        if point is None or [step.operation for step in steps] != migration.operations:
            steps, point = [], None
        ended = self.state.clone()

        def apply(state: ProjectState, editor: Any, collect_sql: bool = False) -> ProjectState:
            if point is None:
                self._render(migration, ended, editor, steps)
            else:
                for step in steps:
                    step.run(migration, editor)
            return state

        # As Django's executor would, with what Migration.apply() does per database only.
        migration.apply = apply  # type: ignore[assignment,method-assign]
        try:
            executor.apply_migration(self.state.clone(), migration)
        finally:
            del migration.apply
        if point is None:
            point = _Point(ended)
            self._next[type(migration)] = steps, point
        return point

    @staticmethod
    def _render(migration: Migration, state: ProjectState, editor: Any, steps: list[_Step]) -> None:
        """Do what ``Migration.apply`` does, and add a step for each operation."""
        for operation in migration.operations:
            before = state.clone()
            if steps:
                steps[-1].after = before
            operation.state_forwards(migration.app_label, state)
            step = _Step(operation, before, state)
            step.run(migration, editor)
            steps.append(step)

    def for_receivers(self) -> ProjectState:
        """Return a state as the executor does, for the receivers of ``post_migrate``.

        The command ``migrate`` renders its models once more, with the relations of the apps that have
        no migrations. From the second call on they are rendered already.
        """
        state = self.state.clone()
        if self._returned is None:
            self._returned = state
        elif rendered := self._rendered_by_command():
            state.apps = rendered.clone()
            state.apps.real_models = []
            state.is_delayed = False
        return state

    def _rendered_by_command(self) -> Any:
        rendered = vars(self._returned).get("apps")
        known = self.state.apps
        if rendered is None or not known.real_models:
            return None
        for model in known.real_models:
            models = [
                each.all_models[model.app_label][model.name_lower] for each in (rendered, known)
            ]
            if models[0] is models[1]:
                return None
        return rendered


class _Step:
    """An operation with the states before and after it."""

    def __init__(self, operation: Operation, before: ProjectState, after: ProjectState) -> None:
        self.operation = operation
        self.before = before
        self.after = after

    def run(self, migration: Migration, editor: Any) -> None:
        """Run the operation on the database of ``editor``, as ``Migration.apply`` does."""
        operation = self.operation
        is_atomic = operation.atomic or (migration.atomic and operation.atomic is not False)
        forwards = (migration.app_label, editor, self.before, self.after)
        if not editor.atomic_migration and is_atomic:
            with atomic(editor.connection.alias):
                operation.database_forwards(*forwards)
        else:
            operation.database_forwards(*forwards)
