"""System checks that ask databases: they run with ``check --database`` and ``migrate``.

Ids are permanent, and numbered with those of ``sharded_orm.checks``.

==================  ==========================================================
``sharded_orm.W025``  a ticket server lacks sequences that models draw from
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from sharded_orm import runtime
from sharded_orm.operations.tickets import missing


@checks.register(checks.Tags.database)
def check_sequences(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check that the ticket servers among ``databases`` have the sequences of all models."""
    return [
        checks.Warning(
            f"Ticket server {server.alias!r} has no sequence {', '.join(map(repr, names))}.",
            hint="Run 'manage.py tickets create', which makes all that models draw from.",
            id="sharded_orm.W025",
        )
        for server in (runtime.tickets().servers if databases else ())
        if server.alias in (databases or ()) and (names := missing(server))
    ]
