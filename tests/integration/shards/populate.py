"""Creates and migrates the databases of the fleet that the environment describes."""

from __future__ import annotations

import os


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.integration.shards.settings"
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connections

    from sharded_orm import runtime
    from tests.model_states import rendered_once

    with rendered_once():
        for alias in ("default", "directory"):
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        for group in runtime.topology().groups.values():
            for shard in group.shards():
                connections[shard.alias].create_shard_database()
                call_command("migrate", database=shard.alias, run_syncdb=True, verbosity=0)
                connections[shard.alias].close()


if __name__ == "__main__":
    main()
