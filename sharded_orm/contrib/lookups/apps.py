from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class LookupsConfig(AppConfig):
    name = "sharded_orm.contrib.lookups"
    label = "sharded_orm_lookups"
    verbose_name = "Lookups"
    default_auto_field = "django.db.models.BigAutoField"
    #: The attributes of ``ShardMeta`` that exist only if this app is installed.
    shard_meta_names = frozenset({"lookups"})

    def ready(self) -> None:
        from sharded_orm.backends.write_hooks.followers import provide_followers
        from sharded_orm.contrib.lookups import checks  # noqa: F401  # registers the checks
        from sharded_orm.contrib.lookups.key_source import EntryKeySource
        from sharded_orm.contrib.lookups.row_changes import follower_of
        from sharded_orm.contrib.lookups.states import after_migrate
        from sharded_orm.models.sharding.key_sources import provide_key_source

        provide_followers(follower_of)
        provide_key_source(EntryKeySource())
        post_migrate.connect(after_migrate, sender=self)
