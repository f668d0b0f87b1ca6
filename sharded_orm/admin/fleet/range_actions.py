"""What can be done to a range: open it, close it, give it another weight."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import FleetAdmin, Step, require_group
from sharded_orm.admin.fleet.shard_map import span
from sharded_orm.operations import growth
from sharded_orm.routing.base import key_routing_of
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import MAX_WEIGHT, ShardGroup, ShardRange, is_weight
from sharded_orm.topology.transitions import KeyRouting

#: Ranges that one page describes; one that is asked for with more shards names no range.
_DESCRIBED = 20
_CHOOSES = (KeyRouting.PLACED, KeyRouting.EMBEDDED)


@dataclass(frozen=True)
class RangeOfPage:
    """A range as a page tells of it.

    :param chooses: whether the group's strategy chooses a shard for a new key at all.
    :param share: of new keys, in percent, that its shards are given together.
    """

    range: ShardRange
    url: str
    set_url: str
    chooses: bool
    share: float

    @property
    def span(self) -> str:
        return span(self.range.first, self.range.last)

    @property
    def weight_text(self) -> str:
        # No locale may put a comma into it.
        return f"{self.range.weight:g}"

    @property
    def is_open(self) -> bool:
        return self.range.open and self.range.weight > 0


class RangePages(FleetAdmin):
    """Changes ``open`` and ``weight`` of ranges, through the source of the topology."""

    def ranges(self, group: ShardGroup, first: int, last: int) -> list[RangeOfPage]:
        """The ranges of the shards ``first`` to ``last``."""
        chooses = key_routing_of(group) in _CHOOSES
        weights = {r: r.weight * (r.last - r.first + 1) for r in group.open_ranges}
        total = sum(weights.values())
        found = [r for r in group.ranges if r.first <= last and r.last >= first]
        return [
            RangeOfPage(
                each,
                self.url("range", group.name, each.first, each.last),
                self.url("set", group.name, each.first, each.last),
                chooses,
                100 * weights.get(each, 0.0) / total if total else 0.0,
            )
            for each in found[:_DESCRIBED]
        ]

    def set_view(self, request: HttpRequest, group: str, first: int, last: int) -> HttpResponse:
        """``do`` is ``open``, ``close`` or ``weight``; asks first, then does it."""
        if (refused := self.require_operator(request)) is not None:
            return refused
        require_group(request, group)
        name, back = f"{group} {first}-{last}", self.url("range", group, first, last)
        each = _range(group, first, last)
        do = request.POST.get("do")
        weight = _weight(request.POST.get("weight", "")) if do == "weight" else None
        if do not in ("open", "close", "weight") or (do == "weight" and weight is None):
            return self.refuse(
                request,
                f"A weight is a number from 0 to {MAX_WEIGHT:,}; a decimal point is fine."
                if do == "weight"
                else f"{do!r} is nothing that can be done to a range.",
                back,
            )
        step = Step(f"{group} {span(first, last)}", back)
        told = {
            "open": "opened for new keys",
            "close": "closed for new keys",
            "weight": f"weight set from {each.weight:g} to {weight if weight is None else f'{weight:g}'}",
        }[do]
        # Where it cannot be written, that is said before anybody confirms anything.
        if runtime.source().writable:
            question = self.confirm(
                request, _question(do, name, each, weight), back, step,
                consequences=_consequences(do, each, weight),
            )  # fmt: skip
            if question is not None:
                return question

        def change() -> Document:
            if weight is not None:
                return growth.set_weight(group, first, last, weight)
            return growth.set_open(group, first, last, do == "open")

        made = self.publish(request, change, back, step)
        if isinstance(made, HttpResponse):
            return made
        self.note(request, name, f"{told} (topology version {made.version})")
        return HttpResponseRedirect(back)


def _range(group: str, first: int, last: int) -> ShardRange:
    found = runtime.topology().groups.get(group)
    for each in found.ranges if found is not None else ():
        if (each.first, each.last) == (first, last):
            return each
    raise Http404(f"Group {group!r} has no range {first}-{last}.")


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if is_weight(weight) else None


def _question(do: str, name: str, each: ShardRange, weight: float | None) -> str:
    shards = each.last - each.first + 1
    what = f"range {name} ({shards} shard{'s' if shards > 1 else ''} on {each.primary})"
    if do == "weight":
        return f"Set the weight of {what} from {each.weight:g} to {weight:g}?"
    return f"{do.capitalize()} {what} for new keys?"


def _consequences(do: str, each: ShardRange, weight: float | None) -> list[str]:
    told = ["Keys that are there stay where they are."]
    if do == "open":
        told.append("New keys are placed on its shards from now on, by all processes.")
    elif do == "close" or not weight:
        told.append("No new key is placed on its shards any more.")
    else:
        told.append(
            f"A shard of weight {weight:g} is given {weight:g} times as many new keys as one of"
            " weight 1."
        )
    return told
