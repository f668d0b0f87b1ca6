"""A base class for Django's commands that work on the tables of one database."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.management import BaseCommand, CommandError

from sharded_orm import runtime


class OneDatabaseCommand(BaseCommand):
    """A command of Django that refuses the alias of a whole shard group, which has no tables itself.

    With any other alias, the command does what Django's command does.
    """

    #: The end of the error message: what the user can do instead. ``{group}`` is replaced by the
    #: name of the group.
    remedy: ClassVar[str] = "name one shard, such as '--database {group}_00000'"
    #: Whether the command accepts the alias of a shard. False for commands whose tables no shard
    #: has, such as the tables of users.
    takes_shards: ClassVar[bool] = True

    def execute(self, *args: Any, **options: Any) -> str | None:
        alias = options["database"]
        topology = runtime.topology()
        if alias in topology.groups and not self.takes_group(alias):
            remedy = self.remedy.format(group=alias)
            raise CommandError(
                f"{alias!r} stands for all shards of the group and has no tables of its own: {remedy}."
            )
        if not self.takes_shards and topology.resolve(alias) is not None:
            raise CommandError(f"{alias!r} is a shard, which has no such tables: {self.remedy}.")
        return super().execute(*args, **options)

    def takes_group(self, alias: str) -> bool:
        """Return whether the command accepts ``alias``, the alias of a shard group. False unless a
        subclass overrides this method.
        """
        return False
