"""The admin pages of long operations, such as migrations.

A run is one execution of an operation. All runs are recorded in the journal, which consists of
tables in the global database.
"""

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
from sharded_orm.models import OperationRun, OperationStep, ShardMap
from sharded_orm.operations import growth, moves, pairs, shard_moves
from sharded_orm.operations.exceptions import JournalMissing
from sharded_orm.operations.imports import row_comparison, row_copy, source_follower
from sharded_orm.operations.migrate import migration_run
from sharded_orm.operations.pairs import upgrade_state
from sharded_orm.operations.promotion.runner import KIND as PROMOTION
from sharded_orm.operations.runs import global_database, journal, lease
from sharded_orm.operations.runs.redaction import without_accounts

#: How many runs one page of the list of runs shows, and how many steps one page of a run shows.
_RUNS, _STEPS = 50, 100
#: A page names at most this many of the shards on which a run is working now.
_MAX_BUSY = 20
#: The states of a step, in the order in which pages show them. A step is the work of a run on one
#: shard or node.
STATES: Final = (
    journal.PENDING, journal.RUNNING, journal.STOPPED, journal.DONE, journal.FAILED,
    journal.UNCLEAR, journal.CARRIED,
)  # fmt: skip

#: Kinds of runs whose work is not divided into steps (the work on one shard or node).
_WITHOUT_STEPS: Final = (moves.KIND, shard_moves.KIND, pairs.KIND, upgrade_state.KIND)
_ENDED = (journal.DONE, journal.FAILED, journal.UNCLEAR, journal.CARRIED)


class RunAdmin(FleetAdmin):
    """The pages "Operations": they show long operations, with the state of each shard.

    These are migrations, growth of shard groups, imports, moves of keys and of shards, switches of
    pairs, and promotions of replicas.
    """

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [
            ("", self.runs_view, "changelist"),
            ("<int:pk>/change/", self.run_view, "change"),
            ("<int:pk>/progress/", self.progress_view, "progress"),
        ]

    def runs_view(self, request: HttpRequest) -> HttpResponse:
        """Show all runs of operations that the user may see, newest first.

        Costs three queries of the journal (the tables that record the runs).
        """
        try:
            with global_database.require_journal():
                page = Paginator(visible_runs(request).order_by("-pk"), _RUNS).get_page(
                    request.GET.get("page")
                )
                rows = list(page.object_list)
                counts = _counts(row.pk for row in rows)
        except JournalMissing as exc:
            return self.page(request, "runs", "Operations", error=str(exc), runs=[])
        contexts = [_context(row, counts.get(row.pk, {})) for row in rows]
        return self.page(
            request,
            "runs",
            "Operations",
            runs=[
                {**context, "url": self.url("change", context["run"].id)} for context in contexts
            ],
            page=page,
        )

    def run_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show one run and its steps, in pages.

        If the URL parameter ``state`` is set, show only the steps in that state.
        """
        context = _run_context(request, pk)
        run: journal.RunStatus = context["run"]
        state = request.GET.get("state", "")
        steps: QuerySet[OperationStep] = OperationStep.objects.using(DEFAULT_DB_ALIAS)
        steps = steps.filter(run_id=pk).order_by("alias")
        if state in STATES:
            steps = steps.filter(state=state)
        pages = Paginator(steps, _STEPS)
        # Give the paginator the number of steps, which is known here. Otherwise the paginator would
        # count the steps again.
        counts = context["counts"]
        pages.__dict__["count"] = counts.get(state, 0) if state in STATES else context["total"]
        page = pages.get_page(request.GET.get("page"))
        shards, resolve = self.admin_of(request, ShardMap), runtime.topology().resolve
        return self.page(
            request,
            "run",
            f"{run.kind} {run.subject}, run {run.id}",
            **context,
            arguments=[
                (name, without_accounts(_argument(run, name, value)))
                for name, value in sorted(run.arguments.items())
            ],
            state=state if state in STATES else "",
            steps=[
                {
                    "row": step,
                    # Make a link only if the shard of the step still exists. A step may also be for
                    # a node, which has no such page.
                    "url": shards.url("shard", step.alias)
                    if shards and resolve(step.alias)
                    else "",
                    "error": without_accounts(step.error),
                }
                for step in page.object_list
            ],
            commands=_commands(run, counts),
            busy=_busy(run) if run.held else [],
            page=page,
            query=urlencode({"state": state}) if state in STATES else "",
            progress_url=self.url("progress", pk) if run.held else "",
        )

    def progress_view(self, request: HttpRequest, pk: int) -> JsonResponse:
        """Return the progress of a run as JSON, for a script in the run's page. Costs three queries."""
        context = _run_context(request, pk)
        run: journal.RunStatus = context["run"]
        return JsonResponse(
            {
                "state": run.state,
                "live": run.held,
                "counts": context["counts"],
                "ended": context["ended"],
                "total": context["total"],
                "percent": context["percent"],
                "busy": _busy(run) if run.held else [],
            }
        )


def visible_runs(request: HttpRequest) -> QuerySet[OperationRun]:
    """Return the runs that the user may see.

    Users who may look into every shard group see all runs. Others see only runs on a shard group
    into which they may look. For example, they see no promotion of a replica, because it may
    concern several groups.
    """
    runs = lease.with_silence(lease.runs())
    return runs if sees_all(request) else runs.filter(subject__in=groups_of(request))


def _counts(runs: Iterable[int]) -> dict[int, dict[str, int]]:
    rows = OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id__in=list(runs))
    counts: dict[int, dict[str, int]] = {}
    for run, state, count in rows.values_list("run_id", "state").annotate(Count("pk")).order_by():
        counts.setdefault(run, {})[state] = count
    return counts


def _run_context(request: HttpRequest, pk: int) -> dict[str, Any]:
    try:
        with global_database.require_journal():
            row = visible_runs(request).filter(pk=pk).first()
            counts = {} if row is None else _counts([pk]).get(pk, {})
    except JournalMissing as exc:
        raise Http404(str(exc)) from exc
    if row is None:
        raise Http404(f"There is no run {pk}.")
    return _context(row, counts)


def _context(row: OperationRun, counts: dict[str, int]) -> dict[str, Any]:
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
        "has_steps": run.kind not in _WITHOUT_STEPS,
        "bad": counts.get(journal.FAILED, 0) + counts.get(journal.UNCLEAR, 0),
    }


def _busy(run: journal.RunStatus) -> list[str]:
    """Return a text for each shard or key on which the run is working now; at most 20 texts.

    A text is ``photos_00007: photos.0002_title`` for a migration, ``42: copying, shard 3 to 7`` for a
    key that moves, and ``shard 3 from db1 to db2: copying`` for a shard that moves or changes the
    active side of its pair.
    """
    if run.kind in (shard_moves.KIND, pairs.KIND):
        current = run.arguments.get("current")
        return [_shard_move(current)] if current else []
    if run.kind == moves.KIND:
        keys = moves.in_flight(run.subject)[:_MAX_BUSY]
        return [f"{key.value}: {key.phase}, shard {key.source} to {key.target}" for key in keys]
    pk = run.id
    rows = OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=pk, state=journal.RUNNING)
    busy = rows.order_by("alias").values_list("alias", "migration")[:_MAX_BUSY]
    return [f"{alias}: {migration}" if migration else alias for alias, migration in busy]


def _commands(run: journal.RunStatus, counts: dict[str, int]) -> list[tuple[str, str]]:
    """Return what an operator can do next about a run, as pairs of a sentence and a shell command.
    The sentence says when to use the command.
    """
    commands = []
    if run.kind == migration_run.KIND:
        command = f"manage.py migrate_shards --group {run.subject}"
        if run.state in ("broken off", "stopped") or counts.get(journal.STOPPED):
            commands.append(("Go on where it stopped, with the same arguments as before", command))
        if counts.get(journal.FAILED):
            commands.append(("Try the failed shards again", f"{command} --retry-failed"))
        if counts.get(journal.UNCLEAR):
            commands.append(
                ("Say of an unclear shard whether the operation took effect (see its cause)",
                 "manage.py migrate_shards --settle SHARD=done|undone")
            )  # fmt: skip
    elif run.state == "broken off" and run.kind == growth.KIND:
        count, primary = run.arguments.get("count"), run.arguments.get("primary")
        command = f"manage.py shards grow {run.subject} --count {count} --primary {primary}"
        commands.append(("Finish it, with the same arguments as before", command))
    elif run.state == "broken off" and run.kind in (row_copy.KIND, row_comparison.KIND):
        work = run.arguments.get("work") or {}
        command = f"manage.py shards import … --from {work.get('source')}"
        if work.get("update"):
            command += " --update"
        if run.kind == row_comparison.KIND:
            command += " --verify"
        commands.append(("Go on where it stopped, with the same models as before", command))
    elif run.state == "broken off" and run.kind == moves.KIND:
        end_moves = f"manage.py keys repair {run.subject}"
        commands.append(("End the moves that were broken off", end_moves))
    elif run.state == "broken off" and run.kind == shard_moves.KIND:
        end_moves = f"manage.py shards move {run.subject} --repair"
        commands.append(("End the move that was broken off", end_moves))
    elif run.state == "broken off" and run.kind == pairs.KIND:
        end_switch = f"manage.py shards switch {run.subject} --repair"
        commands.append(("End the switch that was broken off", end_switch))
    elif run.state == "broken off" and run.kind == upgrade_state.KIND:
        commands.append(("Go on where it stopped", upgrade_state.command_of(run.arguments)))
    elif run.state == "broken off" and run.kind == source_follower.KIND:
        follow = f"manage.py shards import {' '.join(run.arguments.get('models') or ['…'])}"
        follow += f" --from {run.arguments.get('source')}"
        commands += [
            ("Go on following the source", f"{follow} --follow"),
            ("Or follow it no longer", f"{follow} --unfollow"),
        ]
    elif run.state == "broken off" and run.kind == PROMOTION:
        commands.append(("Go on", f"manage.py shards promote {run.arguments.get('node')}"))
    return commands


def _shard_move(current: dict[str, Any]) -> str:
    move = current["move"]
    return f"shard {move['number']} from {move['source']} to {move['target']}: {current['phase']}"


def _argument(run: journal.RunStatus, name: str, value: Any) -> str:
    if run.kind in (shard_moves.KIND, pairs.KIND) and value:
        if name == "current":
            return _shard_move(value)
        if name == "left":
            return "; ".join(f"shard {old['shard']} on {old['node']}" for old in value)
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
