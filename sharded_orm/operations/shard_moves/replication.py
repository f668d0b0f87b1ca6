"""The replication between two nodes.

A move that copies rows is refused if one node replicates from the other. A move by replication
needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from django.db import Error

from sharded_orm import database_settings, runtime
from sharded_orm.backends.mysql.replication import (
    ReplicationLink,
    ReplicationServer,
    ReplicationStatus,
    positions,
)
from sharded_orm.operations.promotion import preflight
from sharded_orm.operations.promotion.plan import supports_promotion
from sharded_orm.operations.shards.status import error_line


class Pair(NamedTuple):
    """The servers of two nodes, and the status of each when its session was opened."""

    source: ReplicationServer
    target: ReplicationServer
    source_status: ReplicationStatus
    target_status: ReplicationStatus

    def link(self) -> ReplicationLink | None:
        """Return the replication connection from the source to the target; None if there is none."""
        number = self.source_status.server_id
        return next((link for link in self.target.links() if link.source_id == number), None)

    def wait(self, seconds: float) -> bool:
        """Wait until the target has replicated all that the source has written by now.

        :param seconds: the longest time to wait.
        :return: False if the target was still behind after that time.
        """
        domain = self.source_status.domain
        last = positions(self.source.status().logged).get(domain)
        return last is None or self.target.wait_for(f"{domain}-{last[0]}-{last[1]}", seconds)


@contextmanager
def open_pair(source: str, target: str) -> Iterator[Pair]:
    """Open sessions on the servers of two nodes. They belong to the accounts ``OPERATOR``, if there are any.

    :raises django.db.Error: a server does not answer, or refuses the account.
    """
    with _server(source) as old, _server(target) as new:
        yield Pair(old, new, old.status(), new.status())


def _server(node: str) -> ReplicationServer:
    settings = database_settings.operator_settings(node) or runtime.topology().nodes[node]
    return ReplicationServer(node, settings)


def replicates(node: str, source: str) -> bool:
    """Whether the server of ``node`` has a replication connection to the server of ``source``."""
    with open_pair(source, node) as pair:
        return pair.target.replicates_from(pair.source_status.server_id)


def neighbour_problems(source: str, target: str) -> Iterator[str]:
    """Yield a sentence if one node replicates from the other, which forbids a copy of rows.

    What a move creates on one server would be replicated into the schema of the same name on the
    other.
    """
    if not supports_promotion(runtime.topology().nodes[source]):
        return
    try:
        with open_pair(source, target) as pair:
            if not (pair.source_status.can_be_promoted and pair.target_status.can_be_promoted):
                return
            for server, other, number in (
                (pair.source, target, pair.target_status.server_id),
                (pair.target, source, pair.source_status.server_id),
            ):
                if server.replicates_from(number):
                    yield (
                        f"{server.name!r} replicates from {other!r}, and shards are not copied between"
                        " a server and its replica: use 'shards split', or end the replication for"
                        " good (RESET SLAVE ALL)"
                    )
    except Error as exc:
        yield (
            f"whether {source!r} and {target!r} replicate from each other is not known"
            f" ({error_line(exc)}): grant SLAVE MONITOR to the account of the node, or give it an"
            " OPERATOR"
        )


def link_problems(source: str, target: str, seconds: float) -> Iterator[str]:
    """Yield sentences that say why ``target`` cannot take shards over as a replica of ``source``.

    :param seconds: how many seconds the target may be behind.
    """
    nodes = runtime.topology().nodes
    for name in (source, target):
        if not supports_promotion(nodes[name]):
            yield f"node {name!r} has the engine {nodes[name]['ENGINE']!r}; only MariaDB is split"
            return
    try:
        with open_pair(source, target) as pair:
            yield from _pair_problems(pair, source, target, seconds)
    except Error as exc:
        yield (
            f"the replication from {source!r} to {target!r} cannot be looked at ({error_line(exc)}):"
            " grant SLAVE MONITOR and BINLOG MONITOR to the accounts, or give the nodes an OPERATOR"
        )


def _pair_problems(pair: Pair, source: str, target: str, seconds: float) -> Iterator[str]:
    old, new = pair.source_status, pair.target_status
    for name, status in ((source, old), (target, new)):
        if not status.can_be_promoted:
            yield f"{name!r} is no MariaDB ({status.version})"
            return
    link = pair.link()
    if link is None:
        yield f"{target!r} does not replicate from {source!r}: make it a replica of the whole server"
        return
    yield from preflight.link_problems(target, link)
    for name, value in pair.source.log_filters().items():
        yield f"{source!r} does not log everything ({name} = {value!r}): rows would be lost"
    if not link.receives:
        yield f"{target!r} does not receive from {source!r}: {link.error or 'it was stopped'}"
    elif link.seconds_behind is not None and link.seconds_behind > seconds:
        yield (
            f"{target!r} is {link.seconds_behind} s behind, more than {seconds:g} s: let it come"
            " nearer, or allow more with --patience"
        )
    if new.read_only:
        yield (
            f"{target!r} is read only, and the application will write there while it still"
            " replicates: SET GLOBAL read_only = OFF, and so in its configuration"
        )
    if old.domain == new.domain:
        yield (
            f"{source!r} and {target!r} have the same gtid_domain_id ({new.domain}), and both will"
            f" write: give {target!r} another one (SET GLOBAL gtid_domain_id = …, and so in its"
            " configuration)"
        )
