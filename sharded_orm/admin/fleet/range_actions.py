"""Admin pages that open a range of shards for new keys, close it, or set its weight."""

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

#: A page describes at most this many ranges.
_MAX_RANGES = 20
#: The kinds of key routing for which the library chooses the shard of a new key: one of the open
#: shards. With any other kind, the value of the key determines the shard.
_CHOOSING = (KeyRouting.PLACED, KeyRouting.EMBEDDED)


@dataclass(frozen=True)
class RangeOfPage:
    """A range of shards, as a page describes it.

    :param set_url: the URL of the view that changes the range.
    :param chooses: True if the library chooses an open shard for each new key, so that no new key
        gets into a closed range. False if the value of a key determines its shard, even if the
        shard's range is closed.
    :param share: the percentage of all new keys that this range gets, with all its shards together.
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
        # Convert the weight to text here, because a template would write a decimal comma in some
        # locales.
        return f"{self.range.weight:g}"

    @property
    def is_open(self) -> bool:
        return self.range.open and self.range.weight > 0


class RangePages(FleetAdmin):
    """Views that open a range of shards for new keys, close it, or set its weight.

    The change is published in the source of the topology (the map of shards to nodes), from which
    all processes load the topology.
    """

    def ranges(self, group: ShardGroup, first: int, last: int) -> list[RangeOfPage]:
        """Return the ranges that include any of the shards with the numbers ``first`` to ``last``.

        If there are more than 20, return only the first 20.
        """
        chooses = key_routing_of(group) in _CHOOSING
        weights = {r: r.weight * (r.last - r.first + 1) for r in group.open_ranges}
        total = sum(weights.values())
        ranges = [r for r in group.ranges if r.first <= last and r.last >= first]
        return [
            RangeOfPage(
                r,
                self.url("range", group.name, r.first, r.last),
                self.url("set", group.name, r.first, r.last),
                chooses,
                100 * weights.get(r, 0.0) / total if total else 0.0,
            )
            for r in ranges[:_MAX_RANGES]
        ]

    def set_view(self, request: HttpRequest, group: str, first: int, last: int) -> HttpResponse:
        """Open a range of shards for new keys, close it, or set its weight, after the user has
        confirmed.

        The POST parameter ``do`` is ``open``, ``close`` or ``weight``.
        """
        if (refused := self.require_operator(request)) is not None:
            return refused
        require_group(request, group)
        name, back = f"{group} {first}-{last}", self.url("range", group, first, last)
        shard_range = _range(group, first, last)
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
        summary = {
            "open": "opened for new keys",
            "close": "closed for new keys",
            "weight": f"weight set from {shard_range.weight:g} to {weight if weight is None else f'{weight:g}'}",
        }[do]
        # Ask for confirmation only if the source of the topology can be written. If it cannot,
        # publish() tells the user so.
        if runtime.source().writable:
            question = self.confirm(
                request, _question(do, name, shard_range, weight), back, step,
                consequences=_consequences(do, weight),
            )  # fmt: skip
            if question is not None:
                return question

        def change() -> Document:
            if weight is not None:
                return growth.set_weight(group, first, last, weight)
            return growth.set_open(group, first, last, do == "open")

        published = self.publish(request, change, back, step)
        if isinstance(published, HttpResponse):
            return published
        self.note(request, name, f"{summary} (topology version {published.version})")
        return HttpResponseRedirect(back)


def _range(group: str, first: int, last: int) -> ShardRange:
    shard_group = runtime.topology().groups.get(group)
    for r in shard_group.ranges if shard_group is not None else ():
        if (r.first, r.last) == (first, last):
            return r
    raise Http404(f"Group {group!r} has no range {first}-{last}.")


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if is_weight(weight) else None


def _question(do: str, name: str, shard_range: ShardRange, weight: float | None) -> str:
    shards = shard_range.last - shard_range.first + 1
    subject = f"range {name} ({shards} shard{'s' if shards > 1 else ''} on {shard_range.primary})"
    if do == "weight":
        return f"Set the weight of {subject} from {shard_range.weight:g} to {weight:g}?"
    return f"{do.capitalize()} {subject} for new keys?"


def _consequences(do: str, weight: float | None) -> list[str]:
    sentences = ["Keys that are there stay where they are."]
    if do == "open":
        sentences.append("New keys are placed on its shards from now on, by all processes.")
    elif do == "close" or not weight:
        sentences.append("No new key is placed on its shards any more.")
    else:
        sentences.append(
            f"A shard of weight {weight:g} is given {weight:g} times as many new keys as one of"
            " weight 1."
        )
    return sentences
