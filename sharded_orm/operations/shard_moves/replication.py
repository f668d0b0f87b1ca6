"""Check the replication between the two nodes of a shard's move.

A shard is moved in one of two ways. A move that copies the rows is refused if one node replicates
from the other. A move by replication copies no rows: it is refused unless the target is a replica
of the source, which has the rows already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from django.db import Error

from sharded_orm import database_settings, runtime
from sharded_orm.backends.replication import (
    ReplicationLink,
    ReplicationServer,
    can_be_promoted,
    server_class,
)
from sharded_orm.operations.promotion import preflight
from sharded_orm.operations.shards.status import error_line


class Pair(NamedTuple):
    """Sessions on the database servers of the two nodes of a move."""

    source: ReplicationServer
    target: ReplicationServer

    def link(self) -> ReplicationLink | None:
        """Return the replication connection from the source server to the target; None without one."""
        return self.target.link_from(self.source)

    def wait(self, seconds: float) -> bool:
        """Wait until the target server has replicated everything that the source has written so far.

        :param seconds: the longest time to wait.
        :return: False if the target was still behind after that time.
        """
        return self.target.wait_for_source(self.source, seconds)


@contextmanager
def open_pair(source: str, target: str) -> Iterator[Pair]:
    """A context manager that opens sessions on the database servers of two nodes.

    The sessions use the accounts ``OPERATOR`` of the nodes, if these exist.

    :raises django.db.Error: a server does not answer, or refuses the account.
    """
    with _server(source) as old, _server(target) as new:
        yield Pair(old, new)


def _server(node: str) -> ReplicationServer:
    settings = database_settings.operator_settings(node) or runtime.topology().nodes[node]
    return server_class(settings)(node, settings)


def takes_shards_over(node: str) -> bool:
    """Return whether a replica of ``node`` can accept writes while it replicates, as on MariaDB.

    Then a shard can move to the replica without a copy of its rows.
    """
    settings = runtime.topology().nodes[node]
    return can_be_promoted(settings) and server_class(settings).replica_takes_writes


def replicates(node: str, source: str) -> bool:
    """Return whether the server of ``node`` is a replica of the server of ``source``."""
    with open_pair(source, node) as pair:
        return pair.target.replicates_from(pair.source)


def neighbour_problems(source: str, target: str) -> Iterator[str]:
    """Yield a sentence if one of the two nodes replicates from the other.

    Between such nodes, the rows of a shard cannot be copied. The shard's schema has the same name
    on both servers. So when the move sends a statement to the schema on one server, replication
    would repeat the statement in the schema on the other server.
    """
    if not can_be_promoted(runtime.topology().nodes[source]):
        return
    try:
        with open_pair(source, target) as pair:
            if not all(server.status().can_be_promoted for server in pair):
                return
            for server, other in (pair, reversed(pair)):
                if other.replicates_from(server):
                    split = "use 'shards split', or " if server.replica_takes_writes else ""
                    yield (
                        f"{other.name!r} replicates from {server.name!r}, and shards are not copied"
                        f" between a server and its replica: {split}end the replication for good"
                        f" ({server.texts.to_end})"
                    )
    except Error as exc:
        yield (
            f"whether {source!r} and {target!r} replicate from each other is not known"
            f" ({error_line(exc)}): {_remedy(source, exc)}"
        )


def _remedy(node: str, exc: Error) -> str:
    server = server_class(runtime.topology().nodes[node])
    if server.has_no_answer(exc):
        return "see that both servers run, or correct the HOST and PORT of the nodes"
    return f"grant {server.texts.to_see} to the accounts of the nodes, or give them an OPERATOR"


def link_problems(source: str, target: str, seconds: float) -> Iterator[str]:
    """Yield a sentence for each reason why shards cannot move from ``source`` to its replica.

    :param target: the node that must be the replica.
    :param seconds: the number of seconds that the replica may be behind.
    """
    nodes = runtime.topology().nodes
    for name in (source, target):
        if not can_be_promoted(nodes[name]):
            yield f"node {name!r} has the engine {nodes[name]['ENGINE']!r}, which does not replicate"
            return
    try:
        with open_pair(source, target) as pair:
            yield from _pair_problems(pair, source, target, seconds)
    except Error as exc:
        yield (
            f"the replication from {source!r} to {target!r} cannot be looked at ({error_line(exc)}):"
            f" {_remedy(source, exc)}"
        )


def _pair_problems(pair: Pair, source: str, target: str, seconds: float) -> Iterator[str]:
    for server in pair:
        status = server.status()
        if not status.can_be_promoted:
            yield f"{server.name!r} is no {server.product} ({status.version})"
            return
    link = pair.link()
    if link is None:
        yield f"{target!r} does not replicate from {source!r}: make it a replica of the whole server"
        return
    yield from preflight.link_problems(pair.target, link)
    yield from pair.source.source_problems()
    if not link.receives:
        yield f"{target!r} does not receive from {source!r}: {link.error or 'it was stopped'}"
    elif link.seconds_behind is not None and link.seconds_behind > seconds:
        yield (
            f"{target!r} is {link.seconds_behind} s behind, more than {seconds:g} s: let it come"
            " nearer, or allow more with --patience"
        )
    yield from pair.target.split_problems(pair.source)
