"""The admin page of the ticket servers, which generate unique ids from named sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import (
    DEADLINE,
    FleetAdmin,
    View,
    ask_service,
    first_sentences,
    groups_of,
)
from sharded_orm.models.fields.tickets import TicketField
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.operations import tickets
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.tickets.largest_ids import declared_sequences
from sharded_orm.operations.tickets.status import SequenceStatus, TicketStatus

#: The number of sequences on one page.
_PER_PAGE = 100
# If less than this share of a sequence's ids is used, the page says "less than 0.1 %" instead of
# the number.
_SMALL = 0.001


class TicketAdmin(FleetAdmin):
    """The page "Tickets": the servers, the position of each sequence on them, and problems."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [("", self.tickets_view, "changelist")]

    def tickets_view(self, request: HttpRequest) -> HttpResponse:
        """Show all ticket servers and, in pages, the sequences that the user may see.

        Each server is queried for all its sequences, including the sequences on other pages.
        """
        outcome = _status()
        status, error = (None, outcome) if isinstance(outcome, str) else (outcome, "")
        hidden = _hidden(request)
        names = sorted(
            {sequence.name for server in status.servers for sequence in server.sequences} - hidden
            if status
            else ()
        )
        problems = [
            problem
            for problem in (status.problems if status else ())
            if not any(repr(name) in problem for name in hidden)
        ]
        page = Paginator(names, _PER_PAGE).get_page(request.GET.get("page"))
        return self.page(
            request,
            "tickets",
            "Tickets",
            servers=[
                {"status": server, "error": without_accounts(server.error or "")}
                for server in (status.servers if status else ())
            ],
            sequences=_rows(status, page.object_list) if status else [],
            problems=first_sentences(problems),
            error=error,
            page=page,
        )


def _status() -> TicketStatus | str:
    servers = len(runtime.config().tickets)
    if not servers:
        return ""
    # Seconds to wait for one ticket server. The servers are queried one after the other. Together
    # they get four fifths of the page's deadline, and each gets an equal part of that. The last
    # fifth is left for the other work of the page.
    patience = 0.8 * DEADLINE / servers
    return ask_service("one of the ticket servers", lambda: tickets.status(patience=patience))


def _hidden(request: HttpRequest) -> set[str]:
    """Return the names of sequences that the user may not see.

    A sequence is hidden if all models that take ids from it are in shard groups into which the user
    may not look.
    """
    allowed = {*groups_of(request), None}
    return {
        name
        for name, fields in declared_sequences().items()
        if allowed.isdisjoint(map(_group, fields))
    }


def _group(field: TicketField) -> str | None:
    options = shard_options(field.model)
    return None if options is None else options.group


def _rows(status: TicketStatus, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return one row of the page's table for each sequence in ``names``.

    A row has the state of the sequence on each server, in the order of the servers.
    """
    by_name: dict[str, dict[str, SequenceStatus]] = {}
    for server in status.servers:
        for sequence in server.sequences:
            by_name.setdefault(sequence.name, {})[server.alias] = sequence
    return [
        {
            "name": name,
            "unused": name in status.unused,
            "drift": status.drift.get(name),
            "cells": [
                {
                    "server": server.alias,
                    "down": server.error is not None,
                    "sequence": sequence,
                    "used": _share(sequence.used) if sequence else "",
                    "problem": without_accounts(sequence.problem or "") if sequence else "",
                }
                for server in status.servers
                for sequence in [by_name[name].get(server.alias)]
            ],
        }
        for name in names
    ]


def _share(used: float) -> str:
    return f"{100 * used:.1f} %" if used >= _SMALL else f"less than {100 * _SMALL:g} %"
