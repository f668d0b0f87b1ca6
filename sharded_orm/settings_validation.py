"""Checks the setting ``SHARDED_ORM`` as a whole when a process starts."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.aliases import ShardedDatabases


def validate_settings() -> None:
    """Check the whole setting ``SHARDED_ORM``, including the strategies of the groups and the
    drivers of the nodes. Also check that its aliases fit the entries of ``DATABASES``.

    :raises InvalidConfiguration: anything is wrong. The error lists every problem.
    """
    problems: list[str] = []
    topology = runtime.topology()
    for name in topology.groups:
        try:
            runtime.strategy(name)
        except InvalidConfiguration as exc:
            problems += exc.problems
    for engine in sorted({node["ENGINE"] for node in topology.nodes.values()}):
        try:
            # Do not call Django's load_backend(): if the import fails, its error advises to use one
            # of Django's own backends.
            import_module(f"{engine}.base")
        except (ImportError, ImproperlyConfigured) as exc:
            names = [name for name, node in topology.nodes.items() if node["ENGINE"] == engine]
            problems.append(
                f"ENGINE {engine!r} of {', '.join(map(repr, names[:5]))} cannot be used:"
                f" {' '.join(str(exc).split())}. Correct it, or install its driver."
            )
    for key, aliases in (
        ("TICKETS", runtime.config().tickets),
        ("DIRECTORY", (runtime.config().directory,)),
    ):
        problems += [
            f"{key} names {alias!r}, which is no alias of DATABASES"
            for alias in aliases
            if (topology.groups or key == "TICKETS")
            and not dict.__contains__(settings.DATABASES, alias)
        ]
    if topology.groups and not isinstance(settings.DATABASES, ShardedDatabases):
        problems.append(
            "DATABASES must be wrapped: DATABASES = sharded_databases({...})"
            " (from sharded_orm.topology.aliases)"
        )
    elif topology.groups:
        try:
            # Add the aliases of the groups now, before the process starts threads. This raises an error
            # if a group has the name of another entry.
            settings.DATABASES.add_groups()
        except InvalidConfiguration as exc:
            problems += exc.problems
    if problems:
        raise InvalidConfiguration(problems)
