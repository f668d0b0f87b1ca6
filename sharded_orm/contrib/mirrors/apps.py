"""The app of mirrors: it follows the writes of their sources."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from django.apps import AppConfig


class MirrorsConfig(AppConfig):
    name = "sharded_orm.contrib.mirrors"
    label = "sharded_orm_mirrors"
    verbose_name = "Mirrors"
    default_auto_field = "django.db.models.BigAutoField"
    #: Each shard has the tables of this app: an outbox of its own, and the versions of its mirrors' rows.
    tables_on_shards = True
    #: What ``ShardMeta`` may say beside what the library itself knows.
    shard_meta_names = frozenset({"mirror_of", "condition", "fields", "verify_reads"})

    def fields_of_sharded_model(self, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a new class has beside those that it declares."""
        from sharded_orm.contrib.mirrors.copied_fields import fields_of_mirror

        return fields_of_mirror(name, attrs)

    def ready(self) -> None:
        from sharded_orm.backends.write_hooks.followers import provide_followers
        from sharded_orm.contrib.mirrors.capture import follower_of

        import_module("sharded_orm.contrib.mirrors.checks")  # The import registers the checks.
        provide_followers(follower_of)
