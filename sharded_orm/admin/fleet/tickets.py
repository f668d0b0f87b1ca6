"""The ticket servers and their sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import DEADLINE, FleetAdmin, View, asked, groups_of, listed
from sharded_orm.models.fields.tickets import TicketField
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.operations import tickets
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.tickets.largest_ids import declared_sequences
from sharded_orm.operations.tickets.status import SequenceStatus, TicketStatus

#: Sequences of one page.
_PER_PAGE = 100
# Of all numbers; less is not told exactly.
_SMALL = 0.001


class TicketAdmin(FleetAdmin):
    """ "Tickets": both servers, where their sequences stand, and what is wrong."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [("", self.tickets_view, "changelist")]

    def tickets_view(self, request: HttpRequest) -> HttpResponse:
        """Asks each server for all its sequences."""
        outcome = _status()
        told, error = (None, outcome) if isinstance(outcome, str) else (outcome, "")
        hidden = _hidden(request)
        names = sorted(
            {one.name for server in told.servers for one in server.sequences} - hidden
            if told
            else ()
        )
        problems = [
            one
            for one in (told.problems if told else ())
            if not any(repr(name) in one for name in hidden)
        ]
        page = Paginator(names, _PER_PAGE).get_page(request.GET.get("page"))
        return self.page(
            request,
            "tickets",
            "Tickets",
            servers=[
                {"it": server, "error": without_accounts(server.error or "")}
                for server in (told.servers if told else ())
            ],
            sequences=_rows(told, page.object_list) if told else [],
            problems=listed(problems),
            error=error,
            page=page,
        )


def _status() -> TicketStatus | str:
    servers = len(runtime.config().tickets)
    if not servers:
        return ""
    # They are asked one after the other; something is left for what follows.
    patience = 0.8 * DEADLINE / servers
    return asked("one of the ticket servers", lambda: tickets.status(patience=patience))


def _hidden(request: HttpRequest) -> set[str]:
    """The sequences that only models of groups draw from which the user may not look into."""
    allowed = {*groups_of(request), None}
    return {
        name
        for name, fields in declared_sequences().items()
        if allowed.isdisjoint(map(_group, fields))
    }


def _group(field: TicketField) -> str | None:
    options = shard_options(field.model)
    return None if options is None else options.group


def _rows(told: TicketStatus, names: Iterable[str]) -> list[dict[str, Any]]:
    """For each sequence what each server tells, in the order of the servers."""
    by_name: dict[str, dict[str, SequenceStatus]] = {}
    for server in told.servers:
        for one in server.sequences:
            by_name.setdefault(one.name, {})[server.alias] = one
    return [
        {
            "name": name,
            "unused": name in told.unused,
            "drift": told.drift.get(name),
            "cells": [
                {
                    "server": server.alias,
                    "down": server.error is not None,
                    "it": one,
                    "used": _share(one.used) if one else "",
                    "problem": without_accounts(one.problem or "") if one else "",
                }
                for server in told.servers
                for one in [by_name[name].get(server.alias)]
            ],
        }
        for name in names
    ]


def _share(used: float) -> str:
    return f"{100 * used:.1f} %" if used >= _SMALL else f"less than {100 * _SMALL:g} %"
