"""The state of pairs of servers, for ``manage.py shards status``: the replication in both directions,
and shards whose passive side accepts writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from django.db import Error

from sharded_orm import runtime
from sharded_orm.backends.replication import ReplicationServer
from sharded_orm.operations.exceptions import JournalMissing, PairRefused
from sharded_orm.operations.nodes import Alive, ask_nodes
from sharded_orm.operations.pairs.pair_servers import open_pair, shards_by_pair
from sharded_orm.operations.pairs.replication_check import given_up_schemas, newer_epoch_problems
from sharded_orm.operations.pairs.upgrade_state import unfinished
from sharded_orm.operations.selection import numbers_text
from sharded_orm.operations.shards.fleet_status import aliases_text
from sharded_orm.operations.shards.status import PATIENCE, SILENCE, error_line
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class DirectionStatus:
    """The state of the replication from the server ``source`` to the server ``target``.

    :param seconds_behind: by how many seconds ``target`` is behind, as its server reports it; None
        if it does not report this.
    :param error: why changes do not arrive; "" if they do.
    """

    source: str
    target: str
    seconds_behind: int | None
    error: str


@dataclass(frozen=True)
class SideStatus:
    """The state of one side of a pair.

    :param active: how many of the selected shards are active on this side.
    :param writable: how many of the selected shards are passive on this side but accept writes
        there, which is wrong.
    :param direction: the replication from the other side; None if a server does not answer.
    """

    node: str
    active: int
    writable: int
    direction: DirectionStatus | None


@dataclass(frozen=True)
class PairStatus:
    """The state of one pair of servers.

    :param nodes: the two nodes.
    :param active: the numbers of selected shards that are active on the first and on the second
        node.
    :param directions: the replication in each direction; empty if a server does not answer.
    :param writable: shards whose passive side wrongly accepts writes, to all tables or to some.
    :param closed: shards whose active side wrongly refuses writes.
    :param outside: nodes that must rejoin the pair. Either they have restarted and so are read
        only, or they were down and were given up.
    :param newer: sentences about nodes on which a shard has a later epoch than in the topology. A
        new epoch of a shard begins when an operator gives up a dead side.
    :param error: why a server did not answer; "" if both did.
    :param upgrade: a sentence without a full stop if a rolling upgrade is not finished; otherwise
        "". During an upgrade, replication may stand still on purpose.
    """

    nodes: tuple[str, str]
    active: tuple[int, int]
    directions: tuple[DirectionStatus, ...] = ()
    writable: tuple[Shard, ...] = ()
    closed: tuple[Shard, ...] = ()
    outside: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    error: str = ""
    upgrade: str = ""

    @property
    def sides(self) -> list[SideStatus]:
        by_target = {direction.target: direction for direction in self.directions}
        return [
            SideStatus(
                node,
                active,
                sum(shard.replica == node for shard in self.writable),
                by_target.get(node),
            )
            for node, active in zip(self.nodes, self.active, strict=True)
        ]

    @property
    def upgrade_problem(self) -> str:
        """Sentences for the operator about the upgrade that is not finished.

        They say that shards of the two sides may differ until the upgrade ends.
        """
        text = (
            f"{self.upgrade[:1].upper()}{self.upgrade[1:]}. Until then, shards of one side may lack migrations,"
            " and differ from others."
        )
        if self.error:
            text += (
                " If a side is lost for ever, end the upgrade by 'manage.py shards switch GROUP --all-from"
                " NODE --force'."
            )
        return text

    @property
    def problems(self) -> list[str]:
        """Sentences about all problems, each with its remedy."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        pair = " and ".join(self.nodes)
        if self.error:
            yield f"The pair {pair} could not be asked: {self.error}."
        if self.upgrade:
            yield self.upgrade_problem
        for newer in self.newer:
            yield f"{newer}."
        for node in self.outside:
            yield (
                f"Node {node!r} was given up while it was dead, or is read only, as after a restart. Run"
                f" 'manage.py pairs rejoin {node}'."
            )
        for direction in self.directions:
            if direction.error and not self.upgrade and not self.outside:
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
        # Leave out shards whose passive side must rejoin the pair, because its server is down or
        # read only. When it rejoins, it is made to refuse writes.
        writable = [s for s in self.writable if s not in swapped and s.replica not in self.outside]
        for group, shards in _by_group(writable):
            yield (
                f"The passive side of {aliases_text(shards)} accepts writes, which would be lost or"
                f" conflict. Run 'manage.py shards switch {group} {numbers_text(shards)} --fence'."
            )
        # During an upgrade, both sides may refuse writes on purpose, until the upgrade makes the
        # shards take writes again. Do not recommend '--repair', which is refused meanwhile.
        closed = [] if self.upgrade else [s for s in self.closed if s not in swapped]
        for group, shards in _by_group(closed):
            yield (
                f"Both sides of {aliases_text(shards)} refuse writes. If no switch is under way, run"
                f" 'manage.py shards switch {group} --repair'."
            )


def pair_states(
    shards: Iterable[Shard] | None = None, *, patience: float = PATIENCE
) -> tuple[PairStatus, ...]:
    """Return the state of each pair of servers with at least one of ``shards``. Changes nothing.

    :param shards: the shards; by default all.
    :param patience: seconds to wait for the first answer of a pair.

    Cost for each pair: a session with each server, and about 15 statements, two of which read all
    fences of a server. Pairs are asked in parallel.
    """
    topology = runtime.topology()
    if not any(r.is_pair for group in topology.groups.values() for r in group.ranges):
        return ()
    if shards is None:
        shards = (shard for group in topology.groups.values() for shard in group.shards())
    by_pair = shards_by_pair(shards)
    by_name = {" and ".join(nodes): nodes for nodes in by_pair}

    def read(name: str, alive: Alive) -> PairStatus:
        return _read(by_name[name], by_pair[by_name[name]], alive)

    answers = ask_nodes(by_name, read, patience=patience, silence=SILENCE, kind="pair")
    states = (
        PairStatus(
            by_name[name],
            _sides(by_name[name], by_pair[by_name[name]]),
            error="; ".join(outcome.problems)
            if isinstance(outcome, PairRefused)
            else error_line(outcome),
        )
        if isinstance(outcome, Exception)
        else outcome
        for name, outcome in answers.items()
    )
    return tuple(replace(state, upgrade=_upgrade(*state.nodes)) for state in states)


def _upgrade(first: str, second: str) -> str:
    try:
        return unfinished(first, second)
    except (JournalMissing, Error):
        return ""  # The state of the servers is shown without the journal, too.


def _sides(nodes: tuple[str, str], shards: Sequence[Shard]) -> tuple[int, int]:
    first = sum(shard.node == nodes[0] for shard in shards)
    return first, len(shards) - first


def _read(nodes: tuple[str, str], shards: Sequence[Shard], alive: Alive) -> PairStatus:
    with open_pair(*nodes) as servers:
        alive()
        directions = tuple(_direction(source, replica) for replica, source in servers.directions)
        read_only = tuple(side.name for side in servers.both if side.status().read_only)
        given_up = tuple(
            side.name for side in servers.both if given_up_schemas(side, servers.shards)
        )
        newer = tuple(
            p for side in servers.both for p in newer_epoch_problems(side, servers.shards)
        )
        alive()
        fences = {
            side.name: side.fences([shard.schema for shard in shards]) for side in servers.both
        }
    return PairStatus(
        nodes,
        _sides(nodes, shards),
        directions,
        tuple(s for s in shards if fences[str(s.replica)][s.schema].accepts_writes),
        tuple(s for s in shards if fences[s.node][s.schema].is_closed),
        tuple(dict.fromkeys([*given_up, *read_only])),
        newer,
    )


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
