"""Records the statements to the databases and the cache hits of a block of code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from django.db import connections

from sharded_orm import runtime
from sharded_orm.cache.statistics import counting

#: Shards of a node, or of a statement, that are listed one by one.
MOST_LINES = 4
_ROOT = Path(__file__).parents[2]
_current: ContextVar[Recording | None] = ContextVar("testproject_recording", default=None)


@dataclass(frozen=True)
class Statement:
    """A statement that was sent. ``alias`` is the alias of a group if it read several shards."""

    alias: str
    sql: str
    seconds: float


@dataclass(frozen=True)
class Scatter:
    """A query with ``scatter()`` that was sent to more than one shard."""

    model: str
    aliases: Sequence[str]
    nodes: Sequence[str]
    call_site: str

    @property
    def place(self) -> str:
        """Return the short form of the place in the code that made the query."""
        return self.call_site.removeprefix(f"{_ROOT}/")


@dataclass(frozen=True)
class Share:
    """The statements of one line of the panel."""

    name: str
    #: The node of a shard; empty for the global databases, and for a statement of many shards.
    node: str
    statements: int
    seconds: float
    sql: str = ""


@dataclass(frozen=True)
class Cached:
    """Cache hits and misses for one model."""

    model: str
    level1: int
    level2: int
    misses: int
    bypasses: int
    fills: int


@dataclass
class Recording:
    """The result of :func:`recording`."""

    statements: list[Statement] = field(default_factory=list)
    scatters: list[Scatter] = field(default_factory=list)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def databases(self) -> list[Share]:
        """Return the statements of each alias, by its first use; those of many shards together."""
        shares = []
        by_node: dict[str, list[str]] = {}
        for alias in dict.fromkeys(each.alias for each in self.statements):
            by_node.setdefault(_node(alias), []).append(alias)
        for node, aliases in by_node.items():
            together = [aliases] if node and len(aliases) > MOST_LINES else [[a] for a in aliases]
            shares += [_share(several, self.statements) for several in together]
        return shares

    @property
    def steps(self) -> list[Share]:
        """Return all statements; consecutive ones with the same text are joined."""
        steps = []
        for sql, several in groupby(self.statements, key=lambda each: each.sql):
            statements = list(several)
            share = _share(list(dict.fromkeys(each.alias for each in statements)), statements)
            steps.append(replace(share, sql=sql))
        return steps

    @property
    def shards(self) -> list[str]:
        """Return the aliases of all shards that were queried."""
        single = [each.alias for each in self.statements if _node(each.alias)]
        return sorted({*single, *(alias for each in self.scatters for alias in each.aliases)})

    @property
    def nodes(self) -> list[str]:
        """Return the nodes of these shards."""
        single = [_node(statement.alias) for statement in self.statements]
        nodes = {*single, *(node for scatter in self.scatters for node in scatter.nodes)}
        return sorted(nodes - {""})

    @property
    def cached(self) -> list[Cached]:
        return [
            Cached(
                model,
                counts.get("l1_hits", 0),
                counts.get("object_hits", 0) + counts.get("list_hits", 0),
                counts.get("object_misses", 0) + counts.get("list_misses", 0),
                counts.get("bypasses", 0),
                counts.get("fills", 0),
            )
            for model, counts in sorted(self.counts.items())
        ]

    @property
    def hits(self) -> int:
        return sum(each.level1 + each.level2 for each in self.cached)

    @property
    def misses(self) -> int:
        return sum(each.misses + each.bypasses for each in self.cached)

    def watch(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        """Record a statement; an execute wrapper, which several threads may call at once."""
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            taken = time.perf_counter() - began
            self.statements.append(Statement(context["connection"].alias, sql, taken))


def _node(alias: str) -> str:
    shard = runtime.topology().resolve(alias)
    return shard.node if shard else ""


def _share(aliases: Sequence[str], statements: Sequence[Statement]) -> Share:
    taken = [each.seconds for each in statements if each.alias in aliases]
    name = ", ".join(aliases)
    if len(aliases) > MOST_LINES:
        name = f"{aliases[0]} … {aliases[-1]}"
    nodes = dict.fromkeys(map(_node, aliases))
    return Share(name, ", ".join(filter(None, nodes)), len(taken), sum(taken))


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what the calling thread does in the block, and the threads that scatter for it.

    Django's execute wrappers see the statements. The wrappers of a group apply to its shards, so
    the configured aliases are enough, however many shards there are. Ticket servers are queried on
    connections of their own and are not recorded.
    """
    with ExitStack() as stack:
        result = Recording(counts=stack.enter_context(counting()))
        for alias in connections:
            stack.enter_context(connections[alias].execute_wrapper(result.watch))
        token = _current.set(result)
        stack.callback(_current.reset, token)
        began = time.perf_counter()
        try:
            yield result
        finally:
            result.seconds = time.perf_counter() - began


def note_scatter(sender: Any, route: Any, call_site: str, **kwargs: Any) -> None:
    """Receiver of ``sharded_orm.signals.scattered``."""
    current = _current.get()
    if current is not None:
        label = sender._meta.label
        current.scatters.append(Scatter(label, route.aliases, route.nodes, call_site))
