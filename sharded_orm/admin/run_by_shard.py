"""Run an action on several shards, with one transaction per shard, and report the outcome."""

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
from sharded_orm.admin.failures import Outages, join_names
from sharded_orm.routers import standing_on

logger = logging.getLogger("sharded_orm.admin")

_REFUSALS = (PermissionDenied, SuspiciousOperation, Http404)


class _PageOfOneShard(Exception):
    """Raised if an action returns a page to show although the selected rows are on several shards."""


def run_by_shard(
    model_admin: ShardedBase,
    request: HttpRequest,
    selection: ActionSelection,
    description: str,
    run: Callable[[Part], Any],
) -> HttpResponseBase | None:
    """Call ``run`` for the selected rows of each shard, and tell the user the outcome.

    Each call runs in a transaction of its own. If a call fails, its changes on that shard and its
    entries in the admin's log are rolled back, and the error is reported. ``run`` is still called
    for the other shards. So the action is not atomic over several shards (Pinterest, P14).

    :return: the page that ``run`` has returned, if all selected rows are on one shard; else None.
    :raises PermissionDenied: ``run`` raised this error before any shard was done or had failed. The
        same applies to ``SuspiciousOperation`` and ``Http404``.
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
        except Exception as error:
            # An action of the project may raise any error, so catch all. Report the error, and
            # continue with the other shards, because rows of earlier shards may have been changed
            # already. But if the first shard raises a refusal, such as a 404, nothing was changed
            # yet. Then refuse the whole action.
            if isinstance(error, _REFUSALS) and not done and not outages.errors:
                raise
            logger.exception("%r failed on %s", description, part.alias)
            outages.add(part.shard, error)
        else:
            done.append(part)
    report(model_admin, request, description, done, outages)
    return response


def _run(part: Part, run: Callable[[Part], Any], *, alone: bool) -> HttpResponseBase | None:
    # Nest the transaction of the shard in the transaction of the admin's log, so that the shard
    # commits first. If its commit fails, the log entries are rolled back.
    log = transaction.atomic(using=router.db_for_write(LogEntry))
    with log, standing_on(part.alias), transaction.atomic(using=part.alias):
        response = run(part)
        if not isinstance(response, HttpResponseBase):
            return None
        if not alone:
            raise _PageOfOneShard
        return response


def report(
    model_admin: ShardedBase,
    request: HttpRequest,
    description: str,
    done: list[Part],
    outages: Outages,
) -> None:
    """Tell the user for how many rows of each shard the action was done, and which shards failed.

    The message about a failed shard names the cause.
    """
    if done:
        rows = sum(part.count for part in done)
        shards = join_names(f"{part.alias} ({part.count})" for part in done)
        model_admin.message_user(
            request,
            f"{description}: {rows} row{'s' if rows != 1 else ''} on {shards}.",
            messages.WARNING if outages.errors else messages.SUCCESS,
        )
    for failure in outages.failed:
        model_admin.message_user(request, f"Not done on {failure}", messages.ERROR)
