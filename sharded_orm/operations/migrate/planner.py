"""Make a migration plan: from the migrations that a shard has applied to the requested target.

The plan is the one that Django's ``migrate`` would make.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db.migrations.exceptions import AmbiguityError, InconsistentMigrationHistory
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

from sharded_orm import compat
from sharded_orm.operations.exceptions import InvalidMigrationTarget
from sharded_orm.operations.migrate.plan import Key, MigrationPlan, Unit

#: A thread holds this lock while Django reads migrations. Django reloads the packages of the
#: migrations, and must not do so in two threads at once.
reading_migrations = threading.RLock()


@dataclass(frozen=True)
class MigrateOptions:
    """Options of ``migrate_shards`` that mean the same as those of Django's ``migrate``."""

    #: App label and migration name, as ``migrate`` takes them. If the label is None, all apps are
    #: meant; if the name is None, all migrations of the app.
    targets: tuple[str | None, str | None] = (None, None)
    fake: bool = False
    fake_initial: bool = False


class Planner:
    """Makes one plan for each set of applied migrations, and keeps it in memory. Thread-safe.

    For each new plan, all migrations are read from disk, and up to four queries are sent. No query
    is sent if no migration is applied.
    """

    def __init__(self, options: MigrateOptions) -> None:
        self._options = options
        self._plans: dict[frozenset[Key], MigrationPlan] = {}

    def plan(self, connection: Any, applied: Iterable[Key]) -> MigrationPlan:
        """Return the plan for shards on which exactly the migrations ``applied`` are recorded.

        :param connection: the connection of one of these shards. No query is sent if ``applied`` is
            empty, so the shard's database need not exist then.
        :raises InvalidMigrationTarget: the target does not exist, or no path leads to it.
        """
        key = frozenset(applied)
        with reading_migrations:
            if key not in self._plans:
                self._plans[key] = self._make(connection, key)
            return self._plans[key]

    @property
    def plans(self) -> list[MigrationPlan]:
        """The plans that were made until now."""
        return list(self._plans.values())

    def _make(self, connection: Any, applied: frozenset[Key]) -> MigrationPlan:
        executor = MigrationExecutor(connection if applied else None)
        loader = executor.loader
        try:
            if applied:
                loader.check_consistent_history(connection)
        except InconsistentMigrationHistory as exc:
            raise InvalidMigrationTarget(f"{connection.alias}: {exc}") from exc
        steps = executor.migration_plan(_targets(loader, self._options))
        directions = {backwards for _, backwards in steps}
        if len(directions) > 1:
            raise InvalidMigrationTarget(
                "The plan has migrations forwards and backwards, which Django refuses as well:"
                f" {', '.join(str(migration) for migration, _ in steps)}. Migrate to a target"
                " between them first."
            )
        full = executor.migration_plan(loader.graph.leaf_nodes(), clean_start=True)
        if True not in directions:
            # Use the same order as MigrationExecutor._migrate_all_forwards().
            forwards = {migration for migration, _ in steps}
            steps = [(migration, False) for migration, _ in full if migration in forwards]
        units = [
            Unit(
                migration,
                backwards,
                connection.alias,
                tuple(compat.migration_records(loader, migration, backwards=backwards)),
            )
            for migration, backwards in steps
        ]
        for unit in units:
            _refuse_irreversible(unit)
        return MigrationPlan(
            applied=applied,
            done=frozenset((app, name) for app, name in loader.applied_migrations),
            units=units,
            replacements=_replacements(loader, applied, units),
            # Call the private method _create_project_state(), as Django's migrate command does.
            _base=executor._create_project_state(with_applied_migrations=True),  # type: ignore[attr-defined]  # the type stubs lack this method
            _full=[migration for migration, _ in full],
        )


def _refuse_irreversible(unit: Unit) -> None:
    # Refuse an irreversible migration before the plan begins. Migration.unapply() would refuse it
    # only after other migrations were undone.
    for operation in unit.migration.operations:
        if unit.backwards and not operation.reversible:
            raise InvalidMigrationTarget(
                f"{unit} cannot be undone: its operation {operation.describe()!r} is not reversible."
            )


def _replacements(
    loader: MigrationLoader, applied: Iterable[Key], units: Iterable[Unit]
) -> list[Key]:
    # Select the same squashed migrations as MigrationExecutor.check_replacements(): those whose
    # replaced migrations are all applied at the end of the plan.
    after = set(applied)
    for unit in units:
        (after.difference_update if unit.backwards else after.update)(unit.records)
    return [
        (key[0], key[1])
        for key in loader.replacements
        if key not in after and compat.all_replaced_applied(loader, key, after)
    ]


def _targets(loader: MigrationLoader, options: MigrateOptions) -> list[tuple[str, str | None]]:
    # Choose and check the targets by the same rules as
    # django.core.management.commands.migrate.Command.handle().
    conflicts = loader.detect_conflicts()
    if conflicts:
        raise InvalidMigrationTarget(
            "Several migrations are the last one of their app: "
            + "; ".join(f"{', '.join(names)} in {app}" for app, names in conflicts.items())
            + ". Run 'manage.py makemigrations --merge'."
        )
    label, prefix = options.targets
    if label is None:
        return list(loader.graph.leaf_nodes())
    try:
        apps.get_app_config(label)
    except LookupError as exc:
        raise InvalidMigrationTarget(str(exc)) from exc
    if label not in loader.migrated_apps:
        raise InvalidMigrationTarget(f"App {label!r} does not have migrations.")
    if prefix is None:
        return [key for key in loader.graph.leaf_nodes() if key[0] == label]
    if prefix == "zero":
        return [(label, None)]
    try:
        migration = loader.get_migration_by_prefix(label, prefix)
    except AmbiguityError as exc:
        raise InvalidMigrationTarget(
            f"More than one migration of app {label!r} begins with {prefix!r}; give more of its name."
        ) from exc
    except KeyError as exc:
        raise InvalidMigrationTarget(
            f"App {label!r} has no migration that begins with {prefix!r};"
            f" 'manage.py showmigrations {label}' lists them."
        ) from exc
    target = (label, migration.name)
    if target not in loader.graph.nodes and target in loader.replacements:
        # If only some of the migrations that a squashed migration replaces are applied, Django's
        # graph does not have the squashed migration. So take the last of the replaced migrations as
        # the target.
        target = loader.replacements[target].replaces[-1]
    return [target]
