"""``manage.py testserver``: Django's command. It also creates test databases of all shards."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import testserver
from django.db import DEFAULT_DB_ALIAS, connections

from sharded_orm import runtime


class Command(testserver.Command):
    """Creates test databases for all aliases, including shards.

    Django's command creates a test database only for ``default``. Then the server would read and
    write the real rows of the shards.
    """

    def handle(self, *fixture_labels: str, **options: Any) -> None:
        aliases = list(connections) if runtime.topology().groups else []
        for alias in aliases:
            if alias != DEFAULT_DB_ALIAS:
                connections[alias].creation.create_test_db(
                    verbosity=options["verbosity"],
                    autoclobber=not options["interactive"],
                    serialize=False,
                )
        super().handle(*fixture_labels, **options)
