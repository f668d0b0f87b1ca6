"""Run an action on several shards, in a transaction on each, and report the outcome."""

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
    """An action on rows of several shards has returned a page."""


def run_by_shard(
    model_admin: ShardedBase,
    request: HttpRequest,
    selection: ActionSelection,
    description: str,
    run: Callable[[Part], Any],
) -> HttpResponseBase | None:
    """Call ``run`` for each part of ``selection``, in a transaction on its shard, and report.

    An error rolls back its shard, with the log entries of that shard, and is reported; the other
    shards go on. Not atomic over shards (P14).

    :return: the page that ``run`` has returned, if there is only one part.
    :raises PermissionDenied: ``run`` refuses, before any shard was done or has failed. The same
        holds for ``SuspiciousOperation`` and ``Http404``.
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
        except Exception as error:  # Logged and reported; the other shards go on.
            if isinstance(error, _REFUSALS) and not done and not outages.errors:
                raise
            logger.exception("%r failed on %s", description, part.alias)
            outages.add(part.shard, error)
        else:
            done.append(part)
    report(model_admin, request, description, done, outages)
    return response


def _run(part: Part, run: Callable[[Part], Any], *, alone: bool) -> HttpResponseBase | None:
    # The shard commits first: if its commit fails, the admin's log has no entry either.
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
    """Show messages: the number of rows on each shard, and each failed shard with its cause."""
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
