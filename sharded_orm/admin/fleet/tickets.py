"""The ticket servers and their sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import DEADLINE, FleetAdmin, View, without_account
from sharded_orm.operations import tickets
from sharded_orm.operations.nodes import Alive, ask_nodes
from sharded_orm.operations.tickets.status import SequenceStatus, TicketStatus

#: Sequences of one page.
_PER_PAGE = 100
# Of all numbers; less is not told exactly.
_SMALL = 0.001
#: What a server is called that did not tell.
_WHO = "the ticket servers"


class TicketAdmin(FleetAdmin):
    """ "Tickets": both servers, where their sequences stand, and what is wrong."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [("", self.tickets_view, "changelist")]

    def tickets_view(self, request: HttpRequest) -> HttpResponse:
        """Asks each server for all its sequences."""
        told, error = _status()
        names = sorted(
            {one.name for server in told.servers for one in server.sequences} if told else ()
        )
        page = Paginator(names, _PER_PAGE).get_page(request.GET.get("page"))
        return self.page(
            request,
            "tickets",
            "Tickets",
            servers=[
                {"it": server, "error": without_account(server.error or "")}
                for server in (told.servers if told else ())
            ],
            sequences=_rows(told, page.object_list) if told else [],
            problems=[without_account(problem) for problem in (told.problems if told else ())],
            error=without_account(error),
            page=page,
        )


def _status() -> tuple[TicketStatus | None, str]:
    servers = len(runtime.config().tickets)
    if not servers:
        return None, ""

    def look(name: str, alive: Alive) -> TicketStatus:
        # They are asked one after the other; something is left for what follows.
        return tickets.status(patience=0.8 * DEADLINE / servers)

    (outcome,) = ask_nodes([_WHO], look, patience=DEADLINE).values()
    if isinstance(outcome, ImproperlyConfigured):
        return None, str(outcome)
    if isinstance(outcome, Exception):
        return None, f"{_WHO.capitalize()} do not answer: {outcome}"
    return outcome, ""


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
                    "problem": without_account(one.problem or "") if one else "",
                }
                for server in told.servers
                for one in [by_name[name].get(server.alias)]
            ],
        }
        for name in names
    ]


def _share(used: float) -> str:
    return f"{100 * used:.1f} %" if used >= _SMALL else f"less than {100 * _SMALL:g} %"
