"""The topology as an immutable value: groups of shards, ranges of shards, and nodes.

A node is a database server. A shard is a numbered schema on a node. Ranges of shards are mapped to
nodes, as at Pinterest (P2). :func:`problems` checks a whole topology before the topology is used. A
topology is never changed, but replaced by a new one. This module uses neither Django nor a database
driver.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from sharded_orm.topology.schema_names import (
    SchemaNames,
    Span,
    postgresql_name_problems,
    shared_number,
)

ALIAS_DIGITS = 5
#: The maximum number of shards of a group. An id that contains its shard number has no room for a
#: larger number: it has 16 bits in a packed id, and only 13 in a timestamped id. The limit also
#: prevents a range with a typing error from filling the memory with shards.
MAX_SHARDS = 1 << 16
#: The maximum weight of a range. A shard's share of new keys is proportional to the weight of its
#: range. Even if every shard of the largest group has this weight, a float represents the sum of
#: the weights exactly.
MAX_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """A logical shard: a numbered schema on a node (database server), and perhaps on a replica."""

    group: str
    number: int
    node: str
    replica: str | None
    schema: str
    #: The shard's database alias in Django, e.g. ``photos_00042``.
    alias: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Format the alias once, because each query needs it, and formatting takes time.
        object.__setattr__(self, "alias", f"{self.group}_{self.number:0{ALIAS_DIGITS}d}")

    def __hash__(self) -> int:
        # Equal shards have the same alias. The generated method would make a tuple of all fields
        # each time, and a scatter has dicts of its shards.
        return hash(self.alias)


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The shards from ``first`` to ``last`` (both included), which are on one node (Pinterest, P2).

    ``primary`` and ``replica`` are names of nodes. ``open`` says whether the shards accept new
    keys. ``weight`` is the share of new keys that each shard of this range receives, relative to
    the weights of the group's other ranges. ``pinned`` says that ``shards balance`` does not move
    the shards. ``is_pair`` says that the two nodes replicate from each other (Yupoo, Y9):
    ``primary`` is the active side, which takes the writes of these shards, and ``replica`` is the
    passive side. ``epoch`` counts how often one of the two nodes was given up as dead, while the
    other went on alone (for example by ``shards switch --force``). If the dead node comes back, it
    is recognized by its older epoch.
    """

    first: int
    last: int
    primary: str
    replica: str | None = None
    open: bool = True
    weight: float = 1.0
    pinned: bool = False
    is_pair: bool = False
    epoch: int = 0


@dataclass(frozen=True)
class ShardGroup:
    """A set of shards with one routing strategy, for example the shards of ``photos``.

    The shards are numbered from 0. ``ranges`` are in the order of their shards.
    """

    name: str
    ranges: tuple[ShardRange, ...]
    strategy: str
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    database_name: str = "{group}_{shard:05d}"
    atomic_requests: bool = False
    #: Models of the group that were removed from the code, but still occur in migrations; each is
    #: (app label, model name) in lower case.
    former_models: frozenset[tuple[str, str]] = frozenset()
    #: Whether a new key gets a shard only after a check that the row to which it refers exists.
    #: Used only if the shard key is a foreign key to the global database.
    check_new_keys: bool = True

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(r.first for r in self.ranges)

    @cached_property
    def count(self) -> int:
        """The number of shards of the group; shards are numbered from 0 without gaps."""
        return self.ranges[-1].last + 1 if self.ranges else 0

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < self.count

    def range_of(self, number: int) -> ShardRange:
        """Return the range of shards that contains the shard with the number ``number``.

        :raises LookupError: the group has no such shard.
        """
        if number not in self:
            raise LookupError(
                f"Group {self.name!r} has no shard {number!r}: its shards are 0 to {self.count - 1}."
            )
        return self.ranges[bisect_right(self._firsts, number) - 1]

    def shard(self, number: int) -> Shard:
        """Return the shard of this group with the number ``number``.

        :raises LookupError: the group has no such shard.
        """
        shard = self._shards.get(number)
        if shard is None:
            holder = self.range_of(number)
            shard = self._shards[number] = Shard(
                self.name, number, holder.primary, holder.replica, self.schema_name(number)
            )
        return shard

    @cached_property
    def _shards(self) -> dict[int, Shard]:
        # A cache of the shards that shard() has returned. Maps the number to the shard. It saves
        # time, because every query calls shard(), and the schema's name must be formatted for each
        # new Shard.
        return {}

    def shards(self) -> Iterator[Shard]:
        """Yield all shards of the group in order.

        This is the only method whose cost grows with the number of shards.
        """
        return (self.shard(number) for number in range(self.count))

    def schema_name(self, number: int) -> str:
        return self.database_name.format(shard=number, group=self.name)

    @property
    def open_ranges(self) -> tuple[ShardRange, ...]:
        """The ranges whose shards accept new keys: open ranges with a weight above 0 (Yupoo, Y3)."""
        return tuple(r for r in self.ranges if r.open and r.weight > 0)


@dataclass(frozen=True)
class Topology:
    """A version of the topology: the nodes and the shard groups.

    ``nodes`` maps the name of each node to its connection settings. ``groups`` maps the name of
    each shard group to the group.
    """

    # Leave the nodes out of repr(), because their connection settings contain passwords.
    nodes: Mapping[str, Mapping[str, Any]] = field(repr=False)
    groups: Mapping[str, ShardGroup]
    version: int = 0

    def resolve(self, alias: str) -> Shard | None:
        """Return the shard whose database alias is ``alias``; None if there is no such shard."""
        shard = self._resolved.get(alias)
        if shard is None:
            shard = self._parse(alias)
            if shard is not None:
                self._resolved[alias] = shard
        return shard

    @cached_property
    def _resolved(self) -> dict[str, Shard]:
        # A cache of the shards that resolve() has returned. Maps the alias to the shard. It saves
        # time, because each write calls resolve() several times.
        return {}

    def alias_spans(self) -> str:
        """Return the aliases of all shards for a message: ``'photos_00000' to 'photos_00007'``."""
        return ", ".join(
            f"{group.shard(0).alias!r} to {group.shard(group.count - 1).alias!r}"
            for group in self.groups.values()
        )

    def pair_of(self, node: str) -> tuple[str, ...]:
        """Return the two nodes of the pair to which ``node`` belongs; () if it belongs to no pair.

        Nodes are compared by their servers, because NODES may contain one server under two names.
        """
        server = server_of(self.nodes[node], node)
        for group in self.groups.values():
            for r in group.ranges:
                if not r.is_pair or r.replica is None:
                    continue
                names = tuple(sorted((r.primary, r.replica)))
                if server in [server_of(self.nodes[name], name) for name in names]:
                    return names
        return ()

    def _parse(self, alias: str) -> Shard | None:
        name, separator, digits = alias.rpartition("_")
        group = self.groups.get(name)
        # Check the length before calling int(), because int() refuses thousands of digits. Check
        # isascii(), because isdigit() is true for digits of other scripts, too.
        if (
            group is None
            or not separator
            or len(digits) != ALIAS_DIGITS
            or not (digits.isascii() and digits.isdigit())
        ):
            return None
        number = int(digits)
        return group.shard(number) if number in group else None


def is_weight(value: object) -> bool:
    """Whether ``value`` is a valid weight of a range: a number from 0 to :data:`MAX_WEIGHT`."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_WEIGHT
    )


def problems(topology: Topology) -> list[str]:
    """Return everything that is wrong with ``topology``, as sentences; empty if it is valid.

    Among other things, each shard of a group must be in exactly one range, and each node in a range
    must exist. No two groups may have a schema in common on a database server.

    Time and memory do not depend on the number of shards in a range.
    """
    problems: list[str] = []
    for group in topology.groups.values():
        problems += _range_problems(topology, group)
        problems += _name_problems(group)
        problems += _names_for_postgresql(topology, group)
        if group.ranges and not group.open_ranges and group.strategy in ("directory", "embedded"):
            problems.append(f"group {group.name!r}: no range is open for new keys")
    if not problems:
        # Look for colliding schemas last: _collisions() works only if ranges and schema names are
        # valid.
        problems += _collisions(topology)
    return problems


def _range_problems(topology: Topology, group: ShardGroup) -> Iterator[str]:
    where = f"group {group.name!r}"
    if not group.ranges:
        yield f"{where}: RANGES is empty; give at least one range"
    expected = 0
    engines = set()
    for r in group.ranges:
        if r.last >= MAX_SHARDS:
            yield (
                f"{where}: range {(r.first, r.last)!r}: a group has at most {MAX_SHARDS:,} shards, so"
                f" its last is {MAX_SHARDS - 1} at most; is it mistyped?"
            )
            return
        if r.first > r.last:
            yield f"{where}: range {(r.first, r.last)!r} ends before it begins"
            continue
        if r.first > expected:
            yield f"{where}: gap, no range covers shards {expected} to {r.first - 1}"
        elif r.first < expected:
            yield (
                f"{where}: overlap, shards {r.first} to {min(r.last, expected - 1)} are in two ranges"
            )
        expected = max(expected, r.last + 1)
        for role, node in (("primary", r.primary), ("replica", r.replica)):
            if node is not None and node not in topology.nodes:
                yield (
                    f"{where}: range {(r.first, r.last)!r} names the unknown {role} {node!r};"
                    f" NODES has {sorted(topology.nodes)!r}"
                )
        if r.primary == r.replica:
            yield f"{where}: range {(r.first, r.last)!r} has the primary {r.primary!r} as its replica"
        elif r.is_pair:
            yield from _pair_problems(topology, f"{where}: range {(r.first, r.last)!r}", r)
        if not is_weight(r.weight):
            yield (
                f"{where}: range {(r.first, r.last)!r}: weight must be a number from 0 to"
                f" {MAX_WEIGHT:,}, not {r.weight!r}"
            )
        if r.primary in topology.nodes:
            engines.add(topology.nodes[r.primary].get("ENGINE"))
    if len(engines) > 1:
        yield f"{where}: its nodes use different engines {sorted(map(str, engines))!r}; use one"


def _pair_problems(topology: Topology, where: str, r: ShardRange) -> Iterator[str]:
    names = [name for name in (r.primary, str(r.replica)) if name in topology.nodes]
    for name in names:
        engine = str(topology.nodes[name].get("ENGINE"))
        if engine.endswith(("postgresql", "sqlite3")):
            yield f"{where}: node {name!r} has the engine {engine!r}; only MariaDB has pairs"
            return
    if len(names) == 2 and len({server_of(topology.nodes[name], name) for name in names}) < 2:
        yield f"{where}: the nodes {names[0]!r} and {names[1]!r} of its pair are the same server"


def _name_problems(group: ShardGroup) -> Iterator[str]:
    where = f"group {group.name!r}"
    if not group.name.isidentifier():
        yield f"{where}: a group's name must be an identifier, because it begins its shards' aliases"
    try:
        SchemaNames.of(group.database_name, group.name)
    except ValueError as exc:
        yield f"{where}: DATABASE_NAME is {group.database_name!r}; {exc}"


def _names_for_postgresql(topology: Topology, group: ShardGroup) -> Iterator[str]:
    """Yield the reasons why PostgreSQL does not accept the group's schema names.

    Yield nothing if none of the group's nodes is a PostgreSQL server.
    """
    engines = [
        str(topology.nodes[r.primary].get("ENGINE"))
        for r in group.ranges
        if r.primary in topology.nodes
    ]
    if not any(engine.endswith("postgresql") for engine in engines):
        return
    try:
        SchemaNames.of(group.database_name, group.name)
    except ValueError:
        return  # _name_problems() yields this problem.
    longest = group.schema_name(max(r.last for r in group.ranges))
    yield from postgresql_name_problems(longest, group.name)


def _collisions(topology: Topology) -> Iterator[str]:
    """Yield a problem for each pair of groups that use the same schema name on the same server."""
    spans = {name: _spans(topology, group) for name, group in topology.groups.items()}
    names = {
        name: SchemaNames.of(group.database_name, name) for name, group in topology.groups.items()
    }
    for one, other in combinations(topology.groups, 2):
        for server in spans[one].keys() & spans[other].keys():
            number = shared_number(
                names[one], spans[one][server], names[other], spans[other][server]
            )
            if number is not None:
                shard = topology.groups[other].shard(number)
                yield (
                    f"groups {one!r} and {other!r} both use schema {shard.schema!r} on"
                    f" node {shard.node!r}; give each group a DATABASE_NAME of its own"
                )
                break


def _spans(topology: Topology, group: ShardGroup) -> dict[object, list[Span]]:
    """Return a dict that maps each database server to the shards of ``group`` whose primary it is.

    A server is represented by the value of :func:`server_of`. The shards are a list of spans (first
    shard, last shard), both included, in ascending order.
    """
    spans: dict[object, list[Span]] = {}
    for r in group.ranges:
        server = server_of(topology.nodes[r.primary], r.primary)
        spans.setdefault(server, []).append((r.first, r.last))
    return spans


def instance_of(node: Mapping[str, Any], name: str) -> object:
    """Return a value that identifies the server of a node, without regard to the node's database.

    On PostgreSQL, a node is one database of a server, and :func:`server_of` returns a different
    value for each database. But replication copies a server with all its databases. So this
    function returns the same value for all databases of a server. For MariaDB, MySQL and SQLite,
    it returns the value of :func:`server_of`. For the parameters, see :func:`server_of`.
    """
    if str(node.get("ENGINE", "")).endswith("postgresql"):
        return server_of({**node, "NAME": ""}, name)
    return server_of(node, name)


def server_of(node: Mapping[str, Any], name: str) -> object:
    """Return a value that identifies the database server of a node.

    If two nodes have equal values, they are on the same server. On PostgreSQL, they are also in the
    same database of the server.

    :param node: the settings of the node.
    :param name: the name of the node. It identifies the server if the settings do not.
    """
    engine = str(node.get("ENGINE", ""))
    if engine.endswith("sqlite3"):
        return (engine, os.path.abspath(str(node.get("NAME", ""))))
    is_postgresql = engine.endswith("postgresql")
    host = str(node.get("HOST", "") or "localhost")
    port = str(node.get("PORT", "") or (5432 if is_postgresql else 3306))
    options = node.get("OPTIONS", {})
    if is_postgresql:
        # On PostgreSQL, return a different value for each database of a server, because two groups
        # can use the same schema name in different databases.
        return (engine, host, port, str(node.get("NAME", "")), str(options.get("service", "")))
    socket = str(options.get("unix_socket", ""))
    return (engine, host, port, socket) if (host or socket) else name
