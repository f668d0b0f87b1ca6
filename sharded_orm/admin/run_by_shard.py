"""One thing done on several shards, each in a transaction of its own, and what is told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import LogEntry
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.db import router, transaction
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase

from sharded_orm.admin.action_selection import ActionSelection, Part
from sharded_orm.admin.base import ShardedBase
from sharded_orm.admin.failures import Outages, listed
from sharded_orm.routers import standing_on

logger = logging.getLogger("sharded_orm.admin")

_REFUSALS = (PermissionDenied, SuspiciousOperation, Http404)


class _PageOfOneShard(Exception):
    """What is to be done once per shard has answered with a page."""


def run_by_shard(
    model_admin: ShardedBase,
    request: HttpRequest,
    selection: ActionSelection,
    description: str,
    run: Callable[[Part], Any],
) -> HttpResponseBase | None:
    """``run`` for each part of ``selection``, in a transaction on its shard, and a report.

    What goes wrong on one shard is taken back there, with its log entries, and reported; the
    others go on. Not atomic over shards (P14).

    :return: the page that it answered with, if there is but one part.
    :raises PermissionDenied: and what else means a refusal, if nothing was done or went wrong before.
    """
    outages, done = selection.outages, list[Part]()
    response = None
    for part in selection.parts:
        if outages.is_lost(part.shard):
            continue
        try:
            response = _run(part, run, alone=len(selection.parts) == 1)
        except _PageOfOneShard:
            model_admin.message_user(
                request,
                f"“{description}” shows a page, which it can do for the rows of one shard: select"
                " those of one shard. (An action that is to see the rows of all shards is marked"
                " with across_shards = True.)",
                messages.ERROR,
            )
            break
        except Exception as error:  # Logged and reported as this shard's; the others go on.
            if isinstance(error, _REFUSALS) and not done and not outages.errors:
                raise
            logger.exception("%r failed on %s", description, part.alias)
            outages.add(part.shard, error)
        else:
            done.append(part)
    report(model_admin, request, description, done, outages)
    return response


def _run(part: Part, run: Callable[[Part], Any], *, alone: bool) -> HttpResponseBase | None:
    # The shard commits first: what it refuses then is not in the admin's log either.
    log = transaction.atomic(using=router.db_for_write(LogEntry))
    with log, standing_on(part.alias), transaction.atomic(using=part.alias):
        found = run(part)
        if not isinstance(found, HttpResponseBase):
            return None
        if not alone:
            raise _PageOfOneShard
        return found


def report(
    model_admin: ShardedBase,
    request: HttpRequest,
    description: str,
    done: list[Part],
    outages: Outages,
) -> None:
    """Messages: how many rows on which shards, and which shards failed why."""
    if done:
        rows = sum(part.count for part in done)
        where = listed(f"{part.alias} ({part.count})" for part in done)
        model_admin.message_user(
            request,
            f"{description}: {rows} row{'s' if rows != 1 else ''} on {where}.",
            messages.WARNING if outages.errors else messages.SUCCESS,
        )
    for failed in outages.failed:
        model_admin.message_user(request, f"Not done on {failed}", messages.ERROR)
