"""What Django loads."""

from __future__ import annotations

import sys
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.signals import setting_changed
from django.db.models.signals import post_migrate
from django.dispatch import receiver

from sharded_orm import conf, runtime


class ShardedOrmConfig(AppConfig):
    name = "sharded_orm"
    label = "sharded_orm"
    verbose_name = "Shards"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from sharded_orm import checks, database_checks  # noqa: F401  for their @register
        from sharded_orm.models import counters, defaults
        from sharded_orm.models.directory import DatabaseDirectory
        from sharded_orm.operations.tickets import TestSequences
        from sharded_orm.topology.aliases import ShardedDatabases

        runtime.provide_directory(DatabaseDirectory)
        runtime.validate()
        post_migrate.connect(TestSequences(), sender=self, weak=False)
        post_migrate.connect(counters.after_migrate)
        post_migrate.connect(defaults.after_migrate)
        if isinstance(settings.DATABASES, ShardedDatabases) and sys.argv[1:2] != ["test"]:
            # Django's commands offer --database only what DATABASES iterates; a shard
            # that the command line names is one that was asked for. (A test run makes
            # test databases of all that it iterates, and shards are made through their
            # group.)
            settings.DATABASES.expose(sys.argv[1:])


@receiver(setting_changed)
def _settings_changed(*, setting: str, **kwargs: Any) -> None:
    if setting == conf.SETTING:
        runtime.reset()
