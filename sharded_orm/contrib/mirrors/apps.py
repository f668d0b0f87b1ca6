"""The Django app of mirrors, which are copies of a model's rows, sharded by a different key."""

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
    #: The tables of this app are on each shard: the outbox (writes of sources that must be
    #: delivered to mirrors), and the versions of the rows of mirrors.
    tables_on_shards = True
    #: The attributes of ``ShardMeta`` that exist only if this app is installed.
    shard_meta_names = frozenset({"mirror_of", "condition", "fields", "verify_reads"})

    def fields_of_sharded_model(self, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that this app adds to a model class while the class is created.

        A mirror gets the copied fields of its source, so that it need not repeat them.

        :param name: the name of the class.
        :param attrs: the attributes in the body of the class.
        """
        from sharded_orm.contrib.mirrors.copied_fields import fields_of_mirror

        return fields_of_mirror(name, attrs)

    def ready(self) -> None:
        from sharded_orm.backends.write_hooks.followers import provide_followers
        from sharded_orm.contrib.mirrors.capture import follower_of

        # The import registers the system checks.
        import_module("sharded_orm.contrib.mirrors.checks")
        provide_followers(follower_of)
