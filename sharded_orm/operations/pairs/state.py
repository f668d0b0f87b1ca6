"""The state of pairs of servers, for ``manage.py shards status``: the replication in both directions,
and shards whose passive side accepts writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from django.db import Error

from sharded_orm import runtime
from sharded_orm.backends.replication import ReplicationServer
from sharded_orm.operations.exceptions import JournalMissing
from sharded_orm.operations.nodes import Alive, ask_nodes
from sharded_orm.operations.pairs.sides import change_nothing, open_fence
from sharded_orm.operations.pairs.upgrade_state import unfinished
from sharded_orm.operations.selection import numbers_text
from sharded_orm.operations.shard_moves.replication import open_pair
from sharded_orm.operations.shards.fleet_status import aliases_text
from sharded_orm.operations.shards.status import PATIENCE, SILENCE, error_line
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class DirectionStatus:
    """The replication from ``source`` to ``target``.

    :param seconds_behind: None if the server does not report it.
    :param error: why changes do not arrive; "" if they do.
    """

    source: str
    target: str
    seconds_behind: int | None
    error: str


@dataclass(frozen=True)
class PairStatus:
    """The state of one pair of servers.

    :param nodes: the two nodes.
    :param active: the number of selected shards that are active on each of them.
    :param directions: the replication; empty if a server does not answer.
    :param writable: shards whose passive side accepts writes, on all tables or on some.
    :param closed: shards whose active side refuses writes.
    :param error: why the servers could not be asked; "" if they could.
    :param upgrade: a sentence without a full stop if a rolling upgrade is not finished. Then replication
        may stand still on purpose.
    """

    nodes: tuple[str, str]
    active: tuple[int, int]
    directions: tuple[DirectionStatus, ...] = ()
    writable: tuple[Shard, ...] = ()
    closed: tuple[Shard, ...] = ()
    error: str = ""
    upgrade: str = ""

    @property
    def problems(self) -> list[str]:
        """Sentences about all problems, each with its remedy."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        pair = " and ".join(self.nodes)
        if self.error:
            yield f"The pair {pair} could not be asked ({self.error})."
        if self.upgrade:
            yield f"{self.upgrade}."
        for direction in self.directions:
            if direction.error and not self.upgrade:
                yield (
                    f"Node {direction.target!r} does not get the changes of {direction.source!r}"
                    f" ({direction.error}). Mend the replication of the pair."
                )
        swapped = [shard for shard in self.writable if shard in self.closed]
        if swapped:
            yield (
                f"The active side of {aliases_text(swapped)} refuses writes, and the passive side takes"
                " them. If the topology was changed by hand, change it back."
            )
        for group, shards in _by_group([s for s in self.writable if s not in swapped]):
            yield (
                f"The passive side of {aliases_text(shards)} accepts writes, which would be lost or"
                f" conflict. Run 'manage.py shards switch {group} {numbers_text(shards)} --fence'."
            )
        for group, shards in _by_group([s for s in self.closed if s not in swapped]):
            yield (
                f"Both sides of {aliases_text(shards)} refuse writes. If no switch is under way, run"
                f" 'manage.py shards switch {group} --repair'."
            )


def pair_states(shards: Iterable[Shard] | None = None) -> tuple[PairStatus, ...]:
    """Return the state of each pair of servers that has one of ``shards``. Changes nothing.

    :param shards: the shards; by default all.

    Cost for each pair: about ten statements, and three for each shard on each server. Pairs are asked
    in parallel.
    """
    shards_by_pair: dict[tuple[str, str], list[Shard]] = {}
    topology = runtime.topology()
    if not any(r.is_pair for group in topology.groups.values() for r in group.ranges):
        return ()
    if shards is None:
        shards = (shard for group in topology.groups.values() for shard in group.shards())
    for shard in shards:
        if topology.groups[shard.group].range_of(shard.number).is_pair:
            one, other = sorted((shard.node, str(shard.replica)))
            shards_by_pair.setdefault((one, other), []).append(shard)
    by_name = {" and ".join(nodes): nodes for nodes in shards_by_pair}

    def read(name: str, alive: Alive) -> PairStatus:
        return _read(by_name[name], shards_by_pair[by_name[name]], alive)

    answers = ask_nodes(by_name, read, patience=PATIENCE, silence=SILENCE, kind="pair")
    return tuple(
        PairStatus(
            by_name[name],
            _sides(by_name[name], shards_by_pair[by_name[name]]),
            error=error_line(outcome),
        )
        if isinstance(outcome, Exception)
        else replace(outcome, upgrade=_upgrade(*by_name[name]))
        for name, outcome in answers.items()
    )


def _upgrade(first: str, second: str) -> str:
    try:
        return unfinished(first, second)
    except (JournalMissing, Error):
        return ""  # The state of the servers is shown without the journal, too.


def _sides(nodes: tuple[str, str], shards: Sequence[Shard]) -> tuple[int, int]:
    first = sum(shard.node == nodes[0] for shard in shards)
    return first, len(shards) - first


def _read(nodes: tuple[str, str], shards: Sequence[Shard], alive: Alive) -> PairStatus:
    with open_pair(*nodes) as pair:
        alive()
        directions = (
            _direction(pair.source, pair.target),
            _direction(pair.target, pair.source),
        )
    writable, closed = [], []
    for shard in shards:
        alive()
        with open_fence(replace(shard, node=str(shard.replica)), change_nothing) as fence:
            if not fence.is_closed() or fence.open_tables():
                writable.append(shard)
        with open_fence(shard, change_nothing) as fence:
            if fence.is_closed():
                closed.append(shard)
    return PairStatus(nodes, _sides(nodes, shards), directions, tuple(writable), tuple(closed))


def _direction(source: ReplicationServer, target: ReplicationServer) -> DirectionStatus:
    link = target.link_from(source)
    if link is None:
        return DirectionStatus(source.name, target.name, None, "it does not replicate from there")
    stopped = [
        what
        for is_running, what in (
            (link.receives, "it does not receive"),
            (link.executes, "it does not execute what it receives"),
        )
        if not is_running
    ]
    error = link.error or " and ".join(stopped) if stopped else ""
    return DirectionStatus(source.name, target.name, link.seconds_behind, error)


def _by_group(shards: Sequence[Shard]) -> Iterator[tuple[str, list[Shard]]]:
    for group in dict.fromkeys(shard.group for shard in shards):
        yield group, [shard for shard in shards if shard.group == group]
