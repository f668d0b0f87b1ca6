"""Close broken database connections, for commands that run until they are stopped."""

from __future__ import annotations

from django.db import connections


def leave_broken_connections() -> None:
    """Close those connections of this thread that are broken, such as after a restart of a server.

    They connect again when they are used. Django itself leaves a broken connection only at the beginning
    or end of a request, and a command has none. Costs nothing as long as no statement has failed.
    """
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()
