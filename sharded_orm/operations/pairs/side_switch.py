"""The switch of one shard from the active side of its pair to the passive side.

Both sides never take writes at the same time, whatever process is killed or paused:

========== =====================================================================================
preparing  The passive side refuses all writes. The active side gets triggers, which refuse nothing
           in this phase. The passive side nearly catches up with the active side.
fencing    The active side refuses writes, after its open transactions have ended. The passive side
           executes everything that the active side has logged until then.
publishing The new topology is being published: the commit point. Before it, everything is undone.
opening    The new side takes writes. Its triggers are dropped; the old side keeps its own.
========== =====================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from django.db import OperationalError

from sharded_orm import runtime
from sharded_orm.backends.replication import ReplicationServer
from sharded_orm.backends.side_fence import SideFence
from sharded_orm.exceptions import TopologyError
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import SwitchFailed
from sharded_orm.operations.pairs.pair_servers import PairServers
from sharded_orm.operations.pairs.record import (
    FENCING,
    PREPARING,
    PUBLISHING,
    SwitchRecord,
)
from sharded_orm.two_phase.recovery import refuse_prepared

#: The largest number of seconds to wait for open transactions when triggers are created or dropped.
TRIGGER_PATIENCE: Final = 10.0
# After the publication, writes wait for at most this number of seconds more, until every process
# uses the new topology. If a process takes longer, the cache is invalidated later.
_PAUSE_FOR_FOLLOWERS: Final = 0.03
# Writes wait until every process uses the new topology. This is checked at this interval, in
# seconds.
_INTERVAL: Final = 0.003
# The wait for the passive side is divided into waits of this number of seconds. Between two of
# them, the process checks that it still holds the lease of the run.
_SLICE: Final = 1.0


class SideSwitch:
    """Switches one shard to the other side of its pair. To be used by one thread.

    :param servers: the operator's sessions. ``servers.first`` is the server of the old side, and
        ``servers.second`` is the server of the new side.
    :param old: the fence of the shard on the old side, which can make this side refuse writes.
    :param new: the fence of the shard on the new side.
    :param check: called before each step. It raises an error if this process must not continue.
    """

    def __init__(
        self,
        record: SwitchRecord,
        servers: PairServers,
        old: SideFence,
        new: SideFence,
        patience: float,
        check: Callable[[], None],
    ) -> None:
        self._record = record
        self._change = record.change
        self._servers = servers
        self._old = old
        self.new = new
        self._patience = patience
        self._check = check
        #: The number of seconds for which writes of the shard waited.
        self.pause = 0.0
        #: Whether every process used the new topology before the new side took writes.
        self.is_followed = False

    def run(self) -> None:
        """Switch the shard. When this method returns, the new side takes writes.

        :raises SwitchFailed: the new side did not catch up, or somebody has created a table during
            the switch, on which the old side does not refuse writes.
        :raises django.db.Error: a server has failed, or a transaction was open for too long.
        """
        self._record.enter(PREPARING)
        close_side(self.new)
        with self._open_transactions():
            self._old.prepare(self._patience)
        self._wait_for_new("before its writes were to wait")
        self._record.prepare()
        self._refuse_prepared()
        self._record.enter(FENCING)
        # During this block, both sides may refuse a write. The process that has sent the write need
        # not fail: it can wait on the server that refused the write, until this block ends.
        with self.new.switching(), self._old.switching():
            began = time.monotonic()
            self._pause()
            self.pause = time.monotonic() - began

    def _pause(self) -> None:
        """Change the active side.

        Writes of the shard wait during this method. To keep the pause short, all that can be done
        before or after the pause is done outside of this method.
        """
        with self._open_transactions():
            self._old.close(self._patience)
        self._refuse_prepared()
        self._wait_for_new("while its writes waited")
        if open_tables := self._old.open_tables():
            raise SwitchFailed(
                f"{self._change} was not switched: somebody has created the tables"
                f" {open_tables!r} meanwhile. Try again."
            )
        self._record.enter(PUBLISHING)
        # Do not record in the journal here that the topology is published, because writes are
        # waiting. open() records it when it confirms that this process may change the fence.
        version = self._record.publish()
        self.is_followed = _is_followed(version)
        self.new.open(TRIGGER_PATIENCE)

    @contextmanager
    def _open_transactions(self) -> Iterator[None]:
        """A context manager. If its block fails because a transaction was open for too long, it
        raises an error that tells an operator what to do.
        """
        try:
            yield
        except OperationalError as exc:
            raise SwitchFailed(
                f"{self._change} was not switched: for {self._patience:g} s, there was always a transaction"
                f" that used a table of it ({exc}). End it, or allow more with --patience."
            ) from exc

    def _refuse_prepared(self) -> None:
        # Refuse the switch if a transaction on the old side is prepared for a two-phase commit. The
        # fence does not always wait for such a transaction: if its session has ended, the
        # transaction holds no metadata locks.
        change = self._change
        refuse_prepared(runtime.group(change.group), [change.on(change.source)])

    def _wait_for_new(self, when: str) -> None:
        """Wait until the new side has executed all that the old side has logged until now."""
        position = self._servers.first.status().logged
        if lacking := wait_for(self._servers.second, position, self._patience, self._check):
            raise SwitchFailed(
                f"{self._change} was not switched: {when}, {self._change.target!r} did not get to"
                f" {lacking} within {self._patience:g} s. Try again when it is nearer, or allow more"
                " with --patience."
            )


def _is_followed(version: int) -> bool:
    """Return whether every process uses the topology ``version`` within some milliseconds.

    Return False at once if the source of the topology cannot push it to the processes.
    """
    if not runtime.source().pushes:
        return False
    try:
        reach = topology.wait_until_used(version, _PAUSE_FOR_FOLLOWERS, interval=_INTERVAL)
    except TopologyError:
        return False
    return reach is not None and not reach.behind


def close_side(fence: SideFence) -> None:
    """Make one side refuse the writes of a shard. Can be repeated.

    Costs only a few queries if the side refuses them already.

    :raises django.db.OperationalError: a transaction was open for too long.
    """
    if not fence.is_closed():
        fence.close(TRIGGER_PATIENCE)
    if fence.open_tables():
        fence.prepare(TRIGGER_PATIENCE)


def remove_fence(fence: SideFence) -> str:
    """Make one side take the writes of a shard, and drop the triggers of its fence. Can be
    repeated.

    Return why the triggers could not be dropped; "" if they were. Triggers that stay refuse
    nothing, and the next switch uses them.

    :raises django.db.OperationalError: the side could not be made to take writes.
    """
    fence.open(TRIGGER_PATIENCE)
    try:
        fence.remove(TRIGGER_PATIENCE)
    except OperationalError as exc:
        return str(exc)
    return ""


def wait_for(
    server: ReplicationServer, position: str, seconds: float, check: Callable[[], None]
) -> str:
    """Wait until ``server`` has executed everything up to ``position``, for at most ``seconds``.

    Return "" if it has. Otherwise return which part of ``position`` it has not executed yet.

    :param check: called about once a second. It raises an error if the wait must end.
    """
    deadline = time.monotonic() + seconds
    while lacking := server.missing(position, server.status().current):
        check()
        left = deadline - time.monotonic()
        if left <= 0:
            return lacking
        server.wait_for(lacking, min(left, _SLICE))
    return ""
