"""Runs of long operations, as the journal has them, while they go on and afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlencode

from django.core.paginator import Paginator
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Count, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import FleetAdmin, View, groups_of, sees_all
from sharded_orm.exceptions import JournalMissing
from sharded_orm.models import OperationRun, OperationStep, ShardMap
from sharded_orm.operations import growth
from sharded_orm.operations.migrate import migration_run
from sharded_orm.operations.promotion.runner import KIND as PROMOTION
from sharded_orm.operations.runs import journal, lease
from sharded_orm.operations.runs.redaction import without_accounts

#: Runs, and steps, of one page.
_RUNS, _STEPS = 50, 100
#: Shards that are named as those that are worked on now.
_BUSY = 20
#: In the order in which a shard goes through them.
STATES: Final = (
    journal.PENDING, journal.RUNNING, journal.STOPPED, journal.DONE, journal.FAILED,
    journal.UNCLEAR, journal.CARRIED,
)  # fmt: skip
_ENDED = (journal.DONE, journal.FAILED, journal.UNCLEAR, journal.CARRIED)


class RunAdmin(FleetAdmin):
    """ "Operations": migrations, growth and promotions, and what became of each shard."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [
            ("", self.runs_view, "changelist"),
            ("<int:pk>/change/", self.run_view, "change"),
            ("<int:pk>/progress/", self.progress_view, "progress"),
        ]

    def runs_view(self, request: HttpRequest) -> HttpResponse:
        """All runs, newest first. Three queries of the journal."""
        try:
            with journal.require_journal():
                page = Paginator(visible_runs(request).order_by("-pk"), _RUNS).get_page(
                    request.GET.get("page")
                )
                rows = list(page.object_list)
                counts = _counts(row.pk for row in rows)
        except JournalMissing as exc:
            return self.page(request, "runs", "Operations", error=str(exc), runs=[])
        told = [_told(row, counts.get(row.pk, {})) for row in rows]
        return self.page(
            request,
            "runs",
            "Operations",
            runs=[{**one, "url": self.url("change", one["run"].id)} for one in told],
            page=page,
        )

    def run_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """One run and its steps, by pages; ``state`` shows those of one state only."""
        told = _one(request, pk)
        run: journal.RunStatus = told["run"]
        state = request.GET.get("state", "")
        steps: QuerySet[OperationStep] = OperationStep.objects.using(DEFAULT_DB_ALIAS)
        steps = steps.filter(run_id=pk).order_by("alias")
        if state in STATES:
            steps = steps.filter(state=state)
        pages = Paginator(steps, _STEPS)
        # They were counted already, by state.
        pages.__dict__["count"] = told["counts"].get(state, 0) if state in STATES else told["total"]
        page = pages.get_page(request.GET.get("page"))
        shards, known = self.other(request, ShardMap), runtime.topology().resolve
        return self.page(
            request,
            "run",
            f"{run.kind} {run.subject}, run {run.id}",
            **told,
            arguments=[
                (name, without_accounts(_shown(value)))
                for name, value in sorted(run.arguments.items())
            ],
            state=state if state in STATES else "",
            steps=[
                {
                    "it": step,
                    # A shard of the past, or a node, has no page.
                    "url": shards.url("shard", step.alias) if shards and known(step.alias) else "",
                    "error": without_accounts(step.error),
                }
                for step in page.object_list
            ],
            commands=_commands(run, told["counts"]),
            busy=_busy(pk) if run.held else [],
            page=page,
            query=urlencode({"state": state}) if state in STATES else "",
            progress_url=self.url("progress", pk) if run.held else "",
        )

    def progress_view(self, request: HttpRequest, pk: int) -> JsonResponse:
        """What the page asks for while a run goes on. Three queries."""
        told = _one(request, pk)
        run: journal.RunStatus = told["run"]
        return JsonResponse(
            {
                "state": run.state,
                "live": run.held,
                "counts": told["counts"],
                "ended": told["ended"],
                "total": told["total"],
                "percent": told["percent"],
                "busy": _busy(pk) if run.held else [],
            }
        )


def visible_runs(request: HttpRequest) -> QuerySet[OperationRun]:
    """All, or those on groups that the user may look into: others may have shards of any group."""
    runs = lease.with_silence(lease.runs())
    return runs if sees_all(request) else runs.filter(subject__in=groups_of(request))


def _counts(runs: Iterable[int]) -> dict[int, dict[str, int]]:
    rows = OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id__in=list(runs))
    found: dict[int, dict[str, int]] = {}
    for run, state, count in rows.values_list("run_id", "state").annotate(Count("pk")).order_by():
        found.setdefault(run, {})[state] = count
    return found


def _one(request: HttpRequest, pk: int) -> dict[str, Any]:
    try:
        with journal.require_journal():
            row = visible_runs(request).filter(pk=pk).first()
            counts = {} if row is None else _counts([pk]).get(pk, {})
    except JournalMissing as exc:
        raise Http404(str(exc)) from exc
    if row is None:
        raise Http404(f"There is no run {pk}.")
    return _told(row, counts)


def _told(row: OperationRun, counts: dict[str, int]) -> dict[str, Any]:
    run = journal.RunStatus(row)
    ended, total = sum(counts.get(state, 0) for state in _ENDED), sum(counts.values())
    return {
        "run": run,
        "error": without_accounts(run.error),
        "counts": counts,
        "states": [(state, counts.get(state, 0)) for state in STATES],
        "ended": ended,
        "total": total,
        "percent": round(100 * ended / total) if total else 0,
        "bad": counts.get(journal.FAILED, 0) + counts.get(journal.UNCLEAR, 0),
    }


def _busy(pk: int) -> list[str]:
    """``photos_00007: photos.0002_title`` of the shards that are worked on."""
    rows = OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=pk, state=journal.RUNNING)
    told = rows.order_by("alias").values_list("alias", "migration")[:_BUSY]
    return [f"{alias}: {migration}" if migration else alias for alias, migration in told]


def _commands(run: journal.RunStatus, counts: dict[str, int]) -> list[tuple[str, str]]:
    """What to do next, and the command that does it."""
    found = []
    if run.kind == migration_run.KIND:
        command = f"manage.py migrate_shards --group {run.subject}"
        if run.state in ("broken off", "stopped") or counts.get(journal.STOPPED):
            found.append(("Go on where it stopped, with the same arguments as before", command))
        if counts.get(journal.FAILED):
            found.append(("Try the failed shards again", f"{command} --retry-failed"))
        if counts.get(journal.UNCLEAR):
            found.append(
                ("Say of an unclear shard whether the operation took effect (see its cause)",
                 "manage.py migrate_shards --settle SHARD=done|undone")
            )  # fmt: skip
    elif run.state == "broken off" and run.kind == growth.KIND:
        count, primary = run.arguments.get("count"), run.arguments.get("primary")
        command = f"manage.py shards grow {run.subject} --count {count} --primary {primary}"
        found.append(("Finish it, with the same arguments as before", command))
    elif run.state == "broken off" and run.kind == PROMOTION:
        found.append(("Go on", f"manage.py shards promote {run.arguments.get('node')}"))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
