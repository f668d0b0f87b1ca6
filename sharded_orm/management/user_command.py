"""A base class for Django's commands about users."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.auth import get_user_model
from django.core.management import CommandError
from django.db import DEFAULT_DB_ALIAS

from sharded_orm.management.one_database import OneDatabaseCommand
from sharded_orm.models.sharding.options import shard_options


class UserCommand(OneDatabaseCommand):
    """A command of Django about users. It refuses the aliases of groups and shards, because users
    are in the global database.

    If the user model is sharded, the command works on the alias of the model's group instead. Then
    the conditions of a query, or the shard key of a new user, determine the shard.
    """

    remedy: ClassVar[str] = "users are in the global database, so leave --database out"
    takes_shards: ClassVar[bool] = False

    def execute(self, *args: Any, **options: Any) -> str | None:
        sharded = shard_options(get_user_model())
        if sharded is not None:
            alias = options["database"]
            if alias not in (DEFAULT_DB_ALIAS, sharded.group):
                raise CommandError(
                    f"{alias!r} is not where users are: they are on all shards of the group"
                    f" {sharded.group!r}, so leave --database out."
                )
            options["database"] = sharded.group
        return super().execute(*args, **options)

    def takes_group(self, alias: str) -> bool:
        sharded = shard_options(get_user_model())
        return sharded is not None and alias == sharded.group
