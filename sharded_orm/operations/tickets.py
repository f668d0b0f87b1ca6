"""Sequences of the ticket servers: begin, look at, check against the rows, repair."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from django.apps import apps
from django.db import connections
from django.db.models import Field

from sharded_orm import runtime
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import SequenceRow, Session
from sharded_orm.models.fields import TicketField

# Seconds for one server to answer; nobody's page waits for it.
PATIENCE = 30.0


def declared() -> dict[str, list[TicketField]]:
    """The sequences that the installed models draw from, with the fields that do, by name."""
    found: dict[str, list[TicketField]] = {}
    for model in apps.get_models():
        if model._meta.proxy:
            continue
        field: Field[Any, Any]
        for field in model._meta.local_concrete_fields:
            if isinstance(field, TicketField):
                found.setdefault(field.sequence_name, []).append(field)
    return dict(sorted(found.items()))


def begin(
    server: TicketServer, names: Iterable[str], *, after: int = 0, form: str | None = None
) -> list[SequenceRow]:
    """Make the catalog and the sequences on one server, where they are missing.

    :param after: the ids of new ones are larger.
    :param form: by default the first that the database has.
    """
    deadline = time.monotonic() + PATIENCE

    def make(session: Session) -> list[SequenceRow]:
        session.create_catalog(deadline)
        chosen = session.forms[0] if form is None else form
        return [session.create(name, chosen, after, deadline) for name in names]

    with server.session(deadline) as lent:
        return lent.ask(make)


class TestSequences:
    """Begins all declared sequences in test databases, where there are no rows yet.

    Called after each ``migrate``. What it sees in a real database it leaves alone: where a
    sequence begins there is for the operator to say.
    """

    __test__ = False

    def __init__(self) -> None:
        self._real = {alias: self._name(alias) for alias in runtime.config().tickets}

    def __call__(self, *, using: str, **kwargs: Any) -> None:
        if using not in self._real or self._name(using) == self._real[using]:
            return
        for server in runtime.tickets().servers:
            if server.alias == using:
                begin(server, declared())

    def _name(self, alias: str) -> str:
        return str(connections.settings[alias]["NAME"])
