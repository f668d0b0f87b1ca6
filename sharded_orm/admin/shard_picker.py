"""The picker above a changelist: shows the chosen shard or key, and lets the user choose another."""

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

# The picker offers at most this many shards, so that the list stays readable. In a larger shard
# group, it offers one shard of each range, which is the first one that the user may look at. The
# user can type in any other shard.
MAX_CHOICES = 256
#: The URL parameters that a link to another shard or key leaves out. They are the present shard and
#: key, the page number, and flags that apply only to the present page.
_OF_THIS_PAGE = frozenset({"p", "e", "all", "_count", SHARD_VAR, KEY_VAR})


@dataclass(frozen=True)
class ShardPicker:
    """The data of the template ``admin/sharded_orm/includes/picker.html``."""

    options: ShardOptions
    parameters: QueryDict
    #: The scope of the request; None if the URL names a shard or key that does not exist.
    scope: ShardScope | None
    #: A function that returns whether the user may look at a shard. The picker offers only such
    #: shards.
    permits: Callable[[Shard], bool]

    @cached_property
    def group(self) -> ShardGroup:
        return runtime.group(self.options.group)

    @property
    def shard(self) -> Shard | None:
        """The chosen shard, or the shard of the chosen key; None if there is no such shard."""
        return self.scope.home if self.scope is not None else None

    @property
    def key(self) -> Any:
        return self.scope.key if self.scope is not None else None

    @property
    def key_text(self) -> str:
        """The chosen key as a user types it; an empty string if no key is chosen.

        The key is given as text, because a template would write a number with thousands separators
        in some locales.
        """
        return str(self.key) if self.key is not None else ""

    @property
    def key_name(self) -> str:
        return str(self.options.key.name) if self.options.key is not None else ""

    @property
    def all_shards(self) -> bool:
        return self.scope is not None and self.scope.everywhere

    @property
    def state(self) -> str:
        """``"open"`` if :attr:`shard` takes new keys, ``"closed"`` if it does not.

        An empty string if :attr:`shard` is None.
        """
        shard = self.shard
        if shard is None:
            return ""
        return "open" if self.group.range_of(shard.number) in self.group.open_ranges else "closed"

    @cached_property
    def parameters_to_keep(self) -> list[tuple[str, str]]:
        """Names and values of the URL parameters that a link to another shard or key keeps, such as
        filters.
        """
        return [
            (name, value)
            for name, values in self.parameters.lists()
            if name not in _OF_THIS_PAGE
            for value in values
        ]

    @property
    def choices(self) -> list[tuple[str, str]]:
        """Return a pair for each shard that the picker offers: the shard's alias and its description."""
        group = self.group
        if group.count <= MAX_CHOICES:
            shards = filter(self.permits, group.shards())
            return [(shard.alias, self._description(shard)) for shard in shards]
        choices = []
        for r in group.ranges[:MAX_CHOICES]:
            shards_of_range = map(group.shard, range(r.first, r.last + 1))
            if (first := next(filter(self.permits, shards_of_range), None)) is not None:
                choices.append((first.alias, f"{r.first} to {r.last}: {self._description(first)}"))
        return choices

    def _description(self, shard: Shard) -> str:
        state = "" if self.group.range_of(shard.number).open else ", closed"
        return f"{shard.node}{state}"

    @property
    def all_shards_link(self) -> str:
        """The link to the list of the rows of all shards."""
        return self._link()

    @cached_property
    def previous(self) -> tuple[str, str] | None:
        """The alias of the shard before the chosen shard, and the link to the list of its rows.

        None if no shard is chosen, or if a key is chosen. Also None if the shard before does not
        exist, or if the user may not look at it.
        """
        return self._neighbour(-1)

    @cached_property
    def next(self) -> tuple[str, str] | None:
        return self._neighbour(1)

    def _neighbour(self, step: int) -> tuple[str, str] | None:
        shard = self.scope.shard if self.scope is not None else None
        if shard is None or self.key is not None or shard.number + step not in self.group:
            return None
        other = self.group.shard(shard.number + step)
        return (other.alias, self.link_to(other.alias)) if self.permits(other) else None

    def link_to(self, alias: str) -> str:
        """Return the link to the list of the rows on the shard ``alias``."""
        return self._link((SHARD_VAR, alias))

    def _link(self, *scope: tuple[str, str]) -> str:
        query = QueryDict(mutable=True)
        for name, value in (*self.parameters_to_keep, *scope):
            query.appendlist(name, value)
        return f"?{query.urlencode()}"
