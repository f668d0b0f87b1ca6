"""Open connections to the two servers of a pair, and find the shards on a pair.

The two servers replicate from each other (master-master replication).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import Error
from django.db.utils import load_backend
from django.utils.module_loading import import_string

from sharded_orm import database_settings, runtime
from sharded_orm.backends.features import features_of
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide


@dataclass(frozen=True)
class PairServers:
    """Connections to both servers of a pair, with the operators' accounts. To be used by one
    thread.

    :param shards: the shards that the topology places on these two servers.
    """

    first: MySQLPairSide
    second: MySQLPairSide
    shards: tuple[Shard, ...]

    @property
    def both(self) -> tuple[MySQLPairSide, MySQLPairSide]:
        return self.first, self.second

    @property
    def directions(self) -> Iterator[tuple[MySQLPairSide, MySQLPairSide]]:
        """The two directions of replication, as pairs (server that receives, server that sends)."""
        yield self.second, self.first
        yield self.first, self.second

    def passive_schemas(self, side: MySQLPairSide) -> list[str]:
        """Return the schemas of the shards for which ``side`` is the passive side."""
        return [shard.schema for shard in self.shards if shard.node != side.name]


def shards_of(first: str, second: str) -> tuple[Shard, ...]:
    """Return the shards that have one of the two nodes as primary and the other as replica."""
    names = {first, second}
    return tuple(
        shard
        for group in runtime.topology().groups.values()
        for shard in group.shards()
        if {shard.node, shard.replica} == names
    )


def all_pairs() -> list[tuple[str, str]]:
    """Return the pairs of the topology, as tuples of two names of nodes."""
    pairs = {
        (min(r.primary, r.replica), max(r.primary, r.replica))
        for group in runtime.topology().groups.values()
        for r in group.ranges
        if r.is_pair and r.replica is not None
    }
    return sorted(pairs)


def shards_by_pair(shards: Iterable[Shard]) -> dict[tuple[str, str], list[Shard]]:
    """Return the shards that are on pairs, grouped by pair. A key is a tuple of the names of the
    two nodes, in alphabetical order. Shards that are not on a pair are left out.
    """
    groups = runtime.topology().groups
    by_pair: dict[tuple[str, str], list[Shard]] = {}
    for shard in shards:
        if groups[shard.group].range_of(shard.number).is_pair:
            one, other = sorted((shard.node, str(shard.replica)))
            by_pair.setdefault((one, other), []).append(shard)
    return by_pair


@contextmanager
def open_pair(first: str, second: str) -> Iterator[PairServers]:
    """A context manager for connections to the two nodes of a pair.

    :raises PairRefused: a node does not exist, its kind of server cannot be in a pair, or no
        connection can be opened. The message lists all reasons.
    """
    servers: list[MySQLPairSide] = []
    problems: list[str] = []
    with ExitStack() as stack:
        for name in (first, second):
            try:
                servers.append(stack.enter_context(open_side(name)))
            except PairRefused as exc:
                problems += exc.problems
        if problems:
            raise PairRefused(dict.fromkeys(problems))
        yield PairServers(servers[0], servers[1], shards_of(first, second))


def open_side(name: str) -> MySQLPairSide:
    """Open a connection to one node of a pair, with the operator's account. It is also a context
    manager.

    :raises PairRefused: the node does not exist, its kind of server cannot be in a pair, or no
        connection can be opened.
    """
    nodes = runtime.topology().nodes
    if name not in nodes:
        raise PairRefused([f"there is no node {name!r}; NODES has {sorted(nodes)!r}"])
    kind = side_class(nodes[name])
    if kind is None:
        raise PairRefused(
            [
                f"node {name!r} has the engine {nodes[name]['ENGINE']!r}, and only MariaDB servers can"
                " replicate from each other: give its ranges a replica, and replace a primary by"
                " 'manage.py shards promote'"
            ]
        )
    entry = database_settings.operator_settings(name)
    if entry is None:
        raise PairRefused(
            [
                f"node {name!r} has no OPERATOR: give it"
                ' "OPERATOR": {"USER": …, "PASSWORD": …}, an account that the application does not use'
            ]
        )
    try:
        return kind(name, entry)
    except Error as exc:
        account = f"the OPERATOR account {entry['USER']!r}"
        raise PairRefused([kind.why_no_session(name, account, exc)]) from exc


def answers(name: str) -> bool:
    """Return whether the server of a node answers, even if it refuses the account.

    Takes up to five seconds.
    """
    try:
        open_side(name).close()
    except PairRefused as exc:
        return not isinstance(exc.__cause__, Error) or not is_silence(name, exc.__cause__)
    return True


def is_silence(name: str, exc: Error) -> bool:
    """Return whether the error means that the server of a node does not answer."""
    kind = side_class(runtime.topology().nodes[name])
    return kind is not None and kind.has_no_answer(exc)


def side_class(settings: Any) -> type[MySQLPairSide] | None:
    """Return the class of connections to a server of a pair.

    Return None if the backend of the node, such as PostgreSQL's, cannot have pairs.

    :param settings: the settings of the node.
    """
    path = features_of(load_backend(settings["ENGINE"]).DatabaseWrapper).pair_side
    kind: type[MySQLPairSide] | None = import_string(path) if path else None
    return kind
