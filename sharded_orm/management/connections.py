"""Close broken database connections, for commands that run until they are stopped."""

from __future__ import annotations

from django.db import connections


def leave_broken_connections() -> None:
    """Close those connections of this thread that are broken, for example because a server was
    restarted.

    Their next use connects again. Django does this at the beginning and the end of a request, which
    a command does not have. Costs nothing if no statement has failed.
    """
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()
