"""The head of a changelist: where one looks, and where else one may look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.http import QueryDict
from django.utils.functional import cached_property

from sharded_orm import runtime
from sharded_orm.admin.shard_scope import KEY_VAR, SHARD_VAR, ShardScope
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.topology.model import Shard, ShardGroup

# A list to choose from is of use to people up to some length; a larger group offers the
# first shard of each range that one may look at, and any other can be typed.
MOST_OFFERED = 256
#: What another place does not take along: the page of this one, the flags of this request.
_OF_THIS_PAGE = frozenset({"p", "e", "all", "_count", SHARD_VAR, KEY_VAR})


@dataclass(frozen=True)
class ShardPicker:
    """What ``admin/sharded_orm/includes/picker.html`` shows."""

    options: ShardOptions
    parameters: QueryDict
    #: None if the request named a place that there is not.
    focus: ShardScope | None
    #: Whether the user may look at a shard; no other is offered.
    permits: Callable[[Shard], bool]

    @cached_property
    def group(self) -> ShardGroup:
        return runtime.group(self.options.group)

    @property
    def shard(self) -> Shard | None:
        """The shard that is looked at; also the one of the key, if it has one."""
        return self.focus.home if self.focus is not None else None

    @property
    def key(self) -> Any:
        return self.focus.key if self.focus is not None else None

    @property
    def key_text(self) -> str:
        """The key as one types it; a template may write a number with separators."""
        return str(self.key) if self.key is not None else ""

    @property
    def key_name(self) -> str:
        return str(self.options.key.name) if self.options.key is not None else ""

    @property
    def across(self) -> bool:
        return self.focus is not None and self.focus.everywhere

    @property
    def state(self) -> str:
        """Whether the shard takes new keys."""
        shard = self.shard
        if shard is None:
            return ""
        return "open" if self.group.range_of(shard.number) in self.group.open_ranges else "closed"

    @cached_property
    def kept(self) -> list[tuple[str, str]]:
        """The parameters that another place takes along, for hidden inputs."""
        return [
            (name, value)
            for name, values in self.parameters.lists()
            if name not in _OF_THIS_PAGE
            for value in values
        ]

    @property
    def offered(self) -> list[tuple[str, str]]:
        """Alias and description of the shards to choose from."""
        group = self.group
        if group.count <= MOST_OFFERED:
            shards = filter(self.permits, group.shards())
            return [(shard.alias, self._described(shard)) for shard in shards]
        found = []
        for r in group.ranges[:MOST_OFFERED]:
            every = map(group.shard, range(r.first, r.last + 1))
            if (first := next(filter(self.permits, every), None)) is not None:
                found.append((first.alias, f"{r.first} to {r.last}: {self._described(first)}"))
        return found

    def _described(self, shard: Shard) -> str:
        state = "" if self.group.range_of(shard.number).open else ", closed"
        return f"{shard.node}{state}"

    @property
    def everywhere(self) -> str:
        """The link to all shards."""
        return self._link()

    @cached_property
    def previous(self) -> tuple[str, str] | None:
        """Alias and link of the shard before this one."""
        return self._neighbour(-1)

    @cached_property
    def next(self) -> tuple[str, str] | None:
        return self._neighbour(1)

    def _neighbour(self, step: int) -> tuple[str, str] | None:
        shard = self.focus.shard if self.focus is not None else None
        if shard is None or self.key is not None or shard.number + step not in self.group:
            return None
        other = self.group.shard(shard.number + step)
        return (other.alias, self.link_to(other.alias)) if self.permits(other) else None

    def link_to(self, alias: str) -> str:
        """The link to a shard."""
        return self._link((SHARD_VAR, alias))

    def _link(self, *place: tuple[str, str]) -> str:
        query = QueryDict(mutable=True)
        for name, value in (*self.kept, *place):
            query.appendlist(name, value)
        return f"?{query.urlencode()}"
