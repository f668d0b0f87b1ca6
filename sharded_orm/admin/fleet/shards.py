"""The admin pages of the shard map, of a range of shards, and of one shard."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.core.paginator import Paginator
from django.db import DEFAULT_DB_ALIAS
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from sharded_orm import runtime
from sharded_orm.admin.fleet.directory import DirectoryPages, keys_on
from sharded_orm.admin.fleet.pages import (
    DEADLINE,
    Step,
    View,
    address,
    first_sentences,
    groups_of,
    require_group,
)
from sharded_orm.admin.fleet.range_actions import RangePages
from sharded_orm.admin.fleet.runs import visible_runs
from sharded_orm.admin.fleet.shard_map import (
    RANGES,
    Addresses,
    RangeOnNode,
    draw,
    ranges_by_node,
    span,
)
from sharded_orm.backends.sizes import TableSize
from sharded_orm.models import OperationRun, OperationStep
from sharded_orm.operations.exceptions import JournalMissing
from sharded_orm.operations.pairs.status import PairStatus, pair_states
from sharded_orm.operations.runs import global_database
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.shards.detail import seconds_left, shard_detail, sizes
from sharded_orm.operations.shards.fleet_status import FleetStatus
from sharded_orm.operations.shards.status import status
from sharded_orm.topology.model import Shard, ShardGroup

#: If the map shows more shards than this, it reads their sizes only if the URL asks for sizes.
#: Sizes are expensive, because the database server has to look into every table of each shard.
_MAX_SIZED = 1000
#: The number of shards that the page of a range lists at a time.
_PER_PAGE = 100
#: The map shows at most this many problems; ``manage.py shards status`` shows all problems.
_PROBLEMS = 20
#: The page of a shard shows at most this many differences between the schema of the shard and the
#: schema of similar shards of the group.
_DIFFERENCES = 10
#: The page of a shard shows at most this many operations, the latest ones.
_STEPS = 5
#: Matches the name of a range in the admin's log, such as ``photos 0-7``.
_RANGE = re.compile(r"(\w+) (\d{1,9})-(\d{1,9})")


class ShardMapAdmin(RangePages, DirectoryPages):
    """The pages "Shards": nodes, ranges and shards, with their states."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [
            ("", self.map_view, "changelist"),
            ("find/", self.find_view, "find"),
            ("forget/", self.forget_view, "forget"),
            ("range/<str:group>/<int:first>-<int:last>/", self.range_view, "range"),
            ("range/<str:group>/<int:first>-<int:last>/set/", self.set_view, "set"),
            ("shard/<str:alias>/", self.shard_view, "shard"),
            ("<path:object_id>/change/", self.logged_view, "change"),
        ]

    # ##### The map #####

    def map_view(self, request: HttpRequest) -> HttpResponse:
        """Show nodes and their ranges of shards, in pages.

        Costs the queries of :func:`status` and, if the map shows sizes, also those of
        :func:`sizes`. If there are pairs of servers, also those of :func:`pair_states`.
        """
        began = time.monotonic()
        topology, allowed = runtime.topology(), groups_of(request)
        group = request.GET.get("group", "")
        if group and group not in allowed:
            messages.error(request, f"There is no group {group!r}.")
            return HttpResponseRedirect(self.url("changelist"))
        groups = [group] if group else allowed
        pages = Paginator(ranges_by_node(topology, groups), RANGES)
        page = pages.get_page(request.GET.get("page"))
        ranges: Sequence[RangeOnNode] = list(page.object_list)
        shards = [shard for on_node in ranges for shard in on_node.shards()]
        by = request.GET.get("size", "")
        if by not in ("bytes", "rows", "same"):
            by = "bytes" if len(shards) <= _MAX_SIZED else "same"
        # If the page shows all shards, call status() without a list of shards. status() then looks
        # at all schemas of the nodes, and also reports schemas that are named like shards, but do
        # not belong on their node.
        whole = pages.num_pages == 1 and len(groups) == len(topology.groups)
        fleet = status(None if whole else shards, within=DEADLINE, sizes=False)
        sizes_by_alias = (
            sizes(_sizable(fleet), within=seconds_left(DEADLINE, began)) if by != "same" else {}
        )
        urls = Addresses(self.url("shard", "ALIAS"), self.url("range", "GROUP", 0, 1))
        drawing = draw(topology, ranges, fleet, sizes_by_alias, by, urls)
        pairs = pair_states(shards, patience=seconds_left(DEADLINE, began))
        problems = [*fleet.problems, *_pair_problems(pairs)]
        return self.page(
            request,
            "map",
            "Shards",
            drawing=drawing,
            pairs=pairs,
            by=by,
            group=group,
            groups=allowed,
            choices=[
                (name, text, f"?{urlencode(_without_empty(group=group, size=name))}")
                for name, text in (("bytes", "bytes"), ("rows", "rows"), ("same", "nothing"))
            ],
            page=page,
            query=urlencode(_without_empty(group=group, size=request.GET.get("size", ""))),
            shards=len(shards),
            problems=[without_accounts(problem) for problem in problems[:_PROBLEMS]],
            more_problems=max(len(problems) - _PROBLEMS, 0),
            find_url=self.url("find"),
            seconds=f"{time.monotonic() - began:.2f}",
        )

    # ##### A range #####

    def range_view(self, request: HttpRequest, group: str, first: int, last: int) -> HttpResponse:
        """Show the shards with the numbers ``first`` to ``last``, in pages, and the ranges to which
        they belong.
        """
        began = time.monotonic()
        shard_group = _group(request, group)
        _require_shards(shard_group, first, last)
        numbers = Paginator(range(first, last + 1), _PER_PAGE)
        page = numbers.get_page(request.GET.get("page"))
        shards = [shard_group.shard(number) for number in page.object_list]
        fleet = status(shards, within=DEADLINE, sizes=False)
        sizes_by_alias = sizes(_sizable(fleet), within=seconds_left(DEADLINE, began))
        statuses = {shard_status.shard.alias: shard_status for shard_status in fleet.shards}
        errors = {
            node.name: without_accounts(node.error)
            for node in fleet.nodes
            if node.error is not None
        }
        return self.page(
            request,
            "range",
            f"{group} {span(first, last)}",
            group=shard_group,
            first=first,
            last=last,
            ranges=self.ranges(shard_group, first, last),
            errors=errors.items(),
            rows=[
                {
                    "shard": shard,
                    "url": self.url("shard", shard.alias),
                    "state": shard_status.state if shard_status else "down",
                    "behind": shard_status.behind if shard_status else 0,
                    "following": shard_status.following if shard_status else "",
                    "size": sizes_by_alias.get(shard.alias),
                }
                for shard in shards
                for shard_status in [statuses.get(shard.alias)]
            ],
            page=page,
            problems=first_sentences(fleet.problems),
        )

    # ##### One shard #####

    def shard_view(self, request: HttpRequest, alias: str) -> HttpResponse:
        """Show what is known about one shard.

        Costs the queries of :func:`shard_detail`, and at most two more: one query of the journal of
        operations, and one of the directory, the table that records the shard of each key.
        """
        shard = runtime.topology().resolve(alias)
        if shard is None or shard.group not in runtime.topology().groups:
            raise Http404(f"There is no shard {alias!r}.")
        group = _group(request, shard.group)
        began = time.monotonic()
        detail = shard_detail(shard, within=DEADLINE)
        shard_range = group.range_of(shard.number)
        range_url = self.url("range", group.name, shard_range.first, shard_range.last)
        return self.page(
            request,
            "shard",
            shard.alias,
            Step(f"{group.name} {span(shard_range.first, shard_range.last)}", range_url),
            shard=shard,
            group=group,
            detail=detail,
            error=without_accounts(detail.error or ""),
            differences=first_sentences(detail.drift.differences, _DIFFERENCES)
            if detail.drift
            else (),
            node_address=address(runtime.topology().nodes[shard.node]),
            range=shard_range,
            ranges=self.ranges(group, shard.number, shard.number),
            models=self._models(request, shard, detail.tables or ()),
            tables=_largest_first(detail.tables or ()),
            steps=self._steps(request, shard),
            keys=keys_on(shard, within=seconds_left(DEADLINE, began)),
            total=_total(detail.tables),
        )

    def _steps(self, request: HttpRequest, shard: Shard) -> list[dict[str, Any]]:
        """Return the latest operations on ``shard``; an empty list if the user may not look at operations."""
        runs = self.admin_of(request, OperationRun)
        if runs is None:
            return []
        steps = OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(alias=shard.alias)
        steps = steps.filter(run__in=visible_runs(request).values("pk"))
        try:
            with global_database.require_journal():
                rows = list(steps.select_related("run").order_by("-run_id")[:_STEPS])
        except JournalMissing:
            return []
        return [
            {
                "row": row,
                "url": runs.url("change", row.run_id),
                "error": without_accounts(row.error),
            }
            for row in rows
        ]

    def _models(
        self, request: HttpRequest, shard: Shard, tables: Sequence[TableSize]
    ) -> list[dict[str, Any]]:
        """Return the models of the shard's group whose rows the user may see in this admin site.

        Each model is a dict with its name and label, a link to its rows on ``shard``, and the size
        of its table on ``shard``. The size is None if it is not known.
        """
        by_name = {table.name: table for table in tables}
        models = [
            {
                "name": str(model._meta.verbose_name_plural),
                "label": model._meta.label,
                "url": f"{url}?{urlencode({'_shard': shard.alias})}",
                "table": by_name.get(model._meta.db_table),
            }
            for model, _, url in self.changelists(request, shard.group)
        ]
        return sorted(models, key=lambda model: str(model["label"]))

    # ##### Links from the log of the admin #####

    def logged_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Redirect to the page of the shard, range or group that an entry of the admin's log is
        about.
        """
        name = unquote(object_id)
        if match := _RANGE.fullmatch(name):
            return HttpResponseRedirect(self.url("range", match[1], int(match[2]), int(match[3])))
        if runtime.topology().resolve(name) is not None:
            return HttpResponseRedirect(self.url("shard", name))
        if name in runtime.topology().groups:
            return HttpResponseRedirect(f"{self.url('changelist')}?{urlencode({'group': name})}")
        raise Http404(f"There is no shard {name!r} any more.")


def _sizable(fleet: FleetStatus) -> list[Shard]:
    """Return the shards whose sizes can be read. These are the shards that exist and whose nodes answer."""
    return [status.shard for status in fleet.shards if status.state in ("current", "behind")]


def _pair_problems(pairs: Iterable[PairStatus]) -> list[str]:
    return [problem for pair in pairs for problem in pair.problems]


def _without_empty(**parts: str) -> dict[str, str]:
    return {name: value for name, value in parts.items() if value}


def _group(request: HttpRequest, name: str) -> ShardGroup:
    """Return the shard group ``name``.

    :raises PermissionDenied: the user may not look into the group.
    :raises Http404: there is no such group.
    """
    groups = runtime.topology().groups
    require_group(request, name)
    if name not in groups:
        raise Http404(f"There is no group {name!r}.")
    return groups[name]


def _require_shards(group: ShardGroup, first: int, last: int) -> None:
    if not first <= last < group.count:
        raise Http404(f"Group {group.name!r} has the shards 0 to {group.count - 1}.")


def _largest_first(tables: Sequence[TableSize]) -> list[TableSize]:
    return sorted(tables, key=lambda table: (-(table.bytes or 0), -table.rows, table.name))


def _total(tables: Sequence[TableSize] | None) -> dict[str, Any] | None:
    if not tables:
        return None
    known = [table.bytes for table in tables if table.bytes is not None]
    return {
        "rows": sum(table.rows for table in tables),
        "bytes": sum(known) if known else None,
        "estimated": any(table.rows_are != "exact" for table in tables),
    }
