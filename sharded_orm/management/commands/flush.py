"""``manage.py flush``: Django's command. Outside of test runs, it refuses the alias of a shard group."""

from __future__ import annotations

from django.core.management.commands import flush

from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.management.one_database import OneDatabaseCommand


class Command(OneDatabaseCommand, flush.Command):
    remedy = "'manage.py shards run \"flush --no-input\" --group {group}' flushes each shard"

    def takes_group(self, alias: str) -> bool:
        # Django's test cases flush each alias after a test. For a group, this restores the rows of
        # the shards that the test has changed.
        return alias in test_databases
