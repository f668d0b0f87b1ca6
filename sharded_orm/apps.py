"""The Django app. It connects the library's parts with each other and with Django's signals."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.signals import request_finished, request_started, setting_changed
from django.db.models.signals import post_migrate
from django.dispatch import receiver

from sharded_orm import conf, runtime
from sharded_orm.database_settings import CurrentAliases
from sharded_orm.exceptions import InvalidConfiguration, TopologyUnavailable
from sharded_orm.management.startup import end_command, runs_without_topology, starting_command
from sharded_orm.settings_validation import validate_settings
from sharded_orm.topology.aliases import provide_resolver

if TYPE_CHECKING:
    from sharded_orm.ids.tickets.pool import TicketSessionPool

# Enable DATABASES to find the settings of groups and shards as soon as this module is imported.
# ready() would be too late, because Django calls it only after it has loaded the models, and code
# in the modules of models may already use DATABASES.
provide_resolver(CurrentAliases())


class ShardedOrmConfig(AppConfig):
    name = "sharded_orm"
    label = "sharded_orm"
    verbose_name = "Shards"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from sharded_orm.backends import creation, key_guard
        from sharded_orm.backends.group import moved_shards, transaction_memory
        from sharded_orm.backends.group.test_databases import provide_test_databases
        from sharded_orm.backends.write_hooks import observer, route_check
        from sharded_orm.cache import request_cache
        from sharded_orm.ids.tickets.pool import provide_pool_class
        from sharded_orm.models.after_migrate import (
            auto_increment,
            permissions,
            postgresql_defaults,
        )
        from sharded_orm.models.cached import cached_model, model_cache
        from sharded_orm.models.cached.write_observer import CacheObserver
        from sharded_orm.models.moves.repetition import refuse_former_route
        from sharded_orm.models.moves.transactions import check_use, poll_before_snapshot
        from sharded_orm.models.relations import deserialized_rows
        from sharded_orm.models.sharding.counted_ids import counts_per_shard
        from sharded_orm.models.tables.directory import DatabaseDirectory
        from sharded_orm.models.text_keys import guard
        from sharded_orm.operations.tickets import TestSequences
        from sharded_orm.routing import transaction_uses
        from sharded_orm.scatter import counted_ids
        from sharded_orm.topology.aliases import ShardedDatabases

        for module in (
            "cache",
            "commands",
            "databases",
            "models",
            "nodes",
            "packages",
            "sqlite_files",
        ):
            # Importing the module registers its system checks.
            import_module(f"sharded_orm.checks.{module}")
        runtime.provide_directory(DatabaseDirectory)
        observer.provide_observer(CacheObserver())
        route_check.provide_check(refuse_former_route)
        transaction_uses.provide_check(check_use)
        moved_shards.provide_lookup(
            moved_shards.TopologyLookup(
                runtime.refresh, lambda: runtime.config().move_wait, _are_moving
            )
        )
        transaction_memory.provide_knowledge(poll_before_snapshot)
        key_guard.provide_guard(guard)
        counted_ids.provide(counts_per_shard)
        deserialized_rows.install_check()
        creation.provide_isolation(_cache_isolation)
        provide_test_databases(_test_databases)
        provide_pool_class(_ticket_pool_class)
        if apps.is_installed("django.contrib.contenttypes"):
            import_module("sharded_orm.models.relations.generic").install()
        command = starting_command()
        try:
            validate_settings()
        except (InvalidConfiguration, TopologyUnavailable) as exc:
            if command is not None:
                # Without a topology, only two kinds of commands may run. One is "manage.py
                # topology", which publishes the first topology. The other is a command that only
                # prints help. Both work without the signal receivers below, so return.
                if isinstance(exc, TopologyUnavailable) and runs_without_topology(command):
                    return
                end_command(exc, command)
            raise
        runtime.on_reset(cached_model.forget)
        runtime.on_reset(guard.forget)
        request_started.connect(request_cache.begin_request)
        request_finished.connect(request_cache.end_request)
        request_finished.connect(_flush_statistics, dispatch_uid="sharded_orm.statistics")
        post_migrate.connect(model_cache.after_migrate, sender=self)
        post_migrate.connect(TestSequences(), sender=self, weak=False)
        post_migrate.connect(permissions.after_migrate, sender=self)
        post_migrate.connect(auto_increment.after_migrate)
        post_migrate.connect(postgresql_defaults.after_migrate)
        arguments = (command or sys.argv)[1:]
        if isinstance(settings.DATABASES, ShardedDatabases) and arguments[:1] != ["test"]:
            # Django's option --database accepts only aliases over which DATABASES iterates. So make
            # DATABASES yield the shards that the command line names. Do not do this for "test",
            # because Django would then create a test database for each of these shards. The backend
            # of the groups' aliases already creates them.
            settings.DATABASES.expose(arguments)


def _are_moving(group: str) -> bool:
    from sharded_orm.operations.shard_moves.runs_under_way import are_moving

    return are_moving(group)


def _cache_isolation() -> Any:
    from sharded_orm.testing import cache_isolation

    return cache_isolation


def _test_databases(group_wrapper: Any) -> Any:
    from sharded_orm.testing.databases import GroupTestDatabases

    return GroupTestDatabases.of(group_wrapper)


def _ticket_pool_class(alias: str) -> type[TicketSessionPool]:
    from sharded_orm.ids.tickets.pool import TicketSessionPool
    from sharded_orm.operations.tickets.creation import is_test_database

    if not is_test_database(alias):
        return TicketSessionPool
    from sharded_orm.testing.ticket_sessions import TestSessionPool

    return TestSessionPool


def _flush_statistics(**kwargs: Any) -> None:
    """Publish what the cache has counted, such as hits, unless that was done in the last second.

    This is a receiver of ``request_finished``. Django sends that signal after the response, so no
    user waits.
    """
    cache = runtime.used_cache()
    if cache is not None:
        cache.statistics.request_finished()


@receiver(setting_changed)
def _settings_changed(*, setting: str, **kwargs: Any) -> None:
    if setting == conf.SETTING:
        runtime.reset()
    elif setting in ("CACHES", "DATABASES", "DATABASE_ROUTERS", "USE_TZ", "TIME_ZONE"):
        runtime.reset_cache()
