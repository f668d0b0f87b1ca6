"""Make the passive side of a shard the active one if the server of its active side is down.

The active side is *given up*: nobody waits for it, and writes that only this side has are lost for
the time being. Each shard has an *epoch*, a number in the topology and on both sides. When a side
is given up, a greater number is stored in the topology and on the other side. If the given-up side
comes back, its smaller number shows that it must rejoin the pair first
(:mod:`~sharded_orm.operations.pairs.rejoin`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from django.db import Error

from sharded_orm import runtime
from sharded_orm.operations.exceptions import PairRefused, SwitchFailed, SwitchRefused
from sharded_orm.operations.pairs import pair_servers, preflight
from sharded_orm.operations.pairs.plan import SideChange, SwitchPlan
from sharded_orm.operations.pairs.record import (
    FENCING,
    OPENING,
    PREPARING,
    PUBLISHING,
    SwitchRecord,
)
from sharded_orm.operations.pairs.replication_check import given_up_schemas, newer_epoch_problems
from sharded_orm.operations.pairs.report import SwitchOptions, UnsentWrites
from sharded_orm.operations.pairs.side_switch import TRIGGER_PATIENCE, close_side, wait_for
from sharded_orm.operations.pairs.sides import change_nothing, open_fence
from sharded_orm.operations.shard_change import require_publication
from sharded_orm.operations.shards.status import error_line
from sharded_orm.two_phase.recovery import refuse_prepared

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide
    from sharded_orm.backends.side_fence import SideFence

# The old side must answer each statement within this number of seconds. A statement may wait there
# for a transaction; this limit is longer than such a wait.
_ANSWER_WITHIN: Final = 15
# If a side did not answer, it is not asked again for this number of seconds.
_SILENCE: Final = 30.0


def check_forced(
    plan: SwitchPlan, options: SwitchOptions, upgraded: tuple[str, str] | None = None
) -> UnsentWrites | None:
    """Check that the active side of ``plan`` can be given up. Changes nothing.

    Return what may be lost. Return None if the plan has no shards and ``upgraded`` is None.

    :param upgraded: None if the pair is in no rolling upgrade. Otherwise the switch ends the
        upgrade, and these are the names of the given-up side and of the other side. During an
        upgrade, the plan can be without shards, and the other side can have received changes that
        it has not executed yet.

    :raises SwitchRefused: the side cannot be given up, or need not be. Every reason is listed.
    :raises TopologyReadOnly: commands cannot change the topology.
    """
    require_publication(
        plan.changes, SwitchRefused, subject="Sides", done="switched", news="which side is active"
    )
    pairs = {(change.source, change.target) for change in plan.changes}
    if upgraded is not None:
        pairs.add(upgraded)
    if not pairs:
        return None
    if len(pairs) > 1:
        others = sorted(target for _, target in pairs)
        raise SwitchRefused(
            [f"the shards have the other sides {others!r}: name one of them with --to-side"]
        )
    ((node, survivor),) = pairs
    try:
        with pair_servers.open_side(survivor) as side:
            problems = list(
                _survivor_problems(side, node, plan.changes, is_upgrade=upgraded is not None)
            )
            loss = _loss(node, side)
    except PairRefused as exc:
        raise SwitchRefused(exc.problems) from exc
    if not problems and loss.unsent is not None:
        if upgraded is not None and _receives(node, survivor):
            problems.append(
                f"{node!r} answers, and {survivor!r} receives from it: go on with the upgrade, by"
                f" 'pairs rejoin {node}' if it is closed"
            )
        elif _is_in_order(node, survivor):
            problems.append(
                f"{node!r} answers, and {survivor!r} receives from it: switch without --force, which loses"
                " nothing"
            )
    if problems:
        raise SwitchRefused(dict.fromkeys(problems))
    return loss


def _survivor_problems(
    side: MySQLPairSide, node: str, changes: tuple[SideChange, ...], *, is_upgrade: bool
) -> Iterator[str]:
    status = side.status()
    if not status.can_be_promoted:
        yield f"{side.name!r} is no {side.product} ({status.version})"
        return
    if lacking := list(side.operator_problems([change.on(node).schema for change in changes])):
        yield from lacking
        return
    if status.read_only:
        yield (
            f"{preflight.closed_problem(side.name)}, which needs {node!r}, or SET GLOBAL read_only = OFF there"
            f" if {node!r} does not come back"
        )
    links = side.links()
    current = side.status().current  # after the links, which execute meanwhile
    for link in links:
        if not link.executes and not is_upgrade and side.missing(link.received, current):
            # The changes that were received and not executed yet are in the relay log. If both
            # threads of the replication are stopped, START SLAVE deletes this log, even if it
            # starts only one of the threads.
            is_kept = link.receives or link.connecting
            remedy = (
                f"mend the cause, then START SLAVE SQL_THREAD on {side.name!r}"
                if is_kept
                else f"start {node!r} again, or save the relay log of {side.name!r} before anything else:"
                " START SLAVE and a restart would delete it"
            )
            why = f" ({link.error})" if link.error else ""
            yield (
                f"{side.name!r} does not execute what it has received{why}, and it would be lost: {remedy}"
            )
        elif link.receives and not pair_servers.answers(node):
            yield (
                f"{side.name!r} still receives from {node!r}, so it lives, although it does not answer here:"
                " mend that, or stop it. If its host is gone without a word, try again after the"
                " slave_net_timeout (60 s by default)"
            )
    shards = pair_servers.shards_of(node, side.name)
    yield from newer_epoch_problems(side, shards)
    if given_up_schemas(side, shards):
        yield f"{side.name!r} was itself given up: run 'manage.py pairs rejoin {side.name}'"
    for change in changes:
        try:
            with open_fence(change.on(side.name), change_nothing) as fence:
                for problem in fence.privilege_problems():
                    yield f"node {side.name!r}: {problem}"
        except Error as exc:
            yield f"{change} on {side.name!r} cannot be read ({error_line(exc)})"


def _receives(node: str, survivor: str) -> bool:
    with pair_servers.open_pair(node, survivor) as servers:
        link = servers.second.link_from(servers.first)
        return link is not None and link.receives


def _is_in_order(node: str, survivor: str) -> bool:
    with pair_servers.open_pair(node, survivor) as servers:
        return servers.second.follows(servers.first)


def _loss(node: str, survivor: MySQLPairSide) -> UnsentWrites:
    current = survivor.status().current
    try:
        with pair_servers.open_side(node) as side:
            written = side.written()
            received = side.own_part(current)
            return UnsentWrites(node, survivor.name, received, side.missing(written, current))
    except PairRefused:
        received = ",".join(link.received for link in survivor.links()) or current
        return UnsentWrites(node, survivor.name, received, None)


class GivenUpSide:
    """Makes the side that is given up refuse writes, if its server can be reached.

    If the server does not answer for one shard, it is not asked again for some time. So the switch
    of the next shards does not wait for it. To be used by one thread.

    :param confirm: called before each change. It raises an error if this process must not make the
        change.
    :param note: called with a sentence for the operator.
    """

    def __init__(self, confirm: Callable[[], None], note: Callable[[str], None]) -> None:
        self._confirm = confirm
        self._note = note
        self._ask_at = 0.0

    def close(self, change: SideChange) -> None:
        """Make the old side refuse the writes of the shard, if its server can be reached.

        :raises SwitchFailed: the server answers, but the old side does not refuse writes.
        """
        if time.monotonic() < self._ask_at:
            return
        shard = change.on(change.source)
        try:
            with open_fence(shard, self._confirm_closing, answer_within=_ANSWER_WITHIN) as old:
                close_side(old)
        except Error as exc:
            if not pair_servers.is_silence(change.source, exc):
                raise SwitchFailed(
                    f"{change} was not switched: {change.source!r} answers, and does not refuse its writes"
                    f" ({error_line(exc)}). Stop the server, or try again."
                ) from exc
            self._ask_at = time.monotonic() + _SILENCE
            node = change.source
            self._note(
                f"{node} was not reached ({error_line(exc)}). If it was only cut off, it takes writes of"
                f" processes that do not know the new topology. Stop it, or run 'manage.py pairs rejoin"
                f" {node}' when it can be reached"
            )

    def _confirm_closing(self) -> None:
        try:
            self._confirm()
        except Error as exc:  # of the journal's database, not of the old side
            raise SwitchFailed(
                f"the journal does not answer ({error_line(exc)}): try again"
            ) from exc


class ForcedSwitch:
    """Gives up the active side of one shard. To be used by one thread. Can be repeated after a
    kill.

    If the server of the old side can be reached, the old side is made to refuse writes. The
    replication from the old side to the other side is ended. Otherwise, when the old server comes
    back, its last writes would arrive on the other side, and overwrite newer rows there.

    :param survivor: the operator's session on the server of the other side.
    :param new: the fence of the shard on the other side, which makes that side refuse or take
        writes.
    :param old: the side that is given up.
    :param check: called before each step. It raises an error if this process must not continue.
    """

    def __init__(
        self,
        record: SwitchRecord,
        survivor: MySQLPairSide,
        new: SideFence,
        old: GivenUpSide,
        patience: float,
        check: Callable[[], None],
    ) -> None:
        self._record = record
        self._change = record.change
        self._survivor = survivor
        self.new = new
        self._old = old
        self._patience = patience
        self._check = check
        #: The number of seconds for which this process made writes wait.
        self.pause = 0.0
        #: Whether every process used the new topology before the new active side took writes.
        self.is_followed = False

    def run(self) -> None:
        """Make the surviving side the active one. When this method returns, that side takes writes.

        :raises SwitchFailed: the surviving side does not execute the changes that it has received.
        :raises BranchesPrepared: a transaction in two phases has arrived on the surviving side in
            part.
        :raises django.db.Error: the surviving server has failed.
        """
        change = self._change
        assert change.epoch is not None
        self._record.enter(PREPARING)
        close_side(self.new)
        self._record.prepare()
        self._record.enter(FENCING)
        began = time.monotonic()
        self._old.close(change)
        end_replication(self._survivor, self._patience, self._check, f"{change} was not switched")
        refuse_prepared(runtime.group(change.group), [change.on(change.target)])
        self._record.enter(PUBLISHING)
        self._record.publish()
        self._record.enter(OPENING)
        self.new.store_epoch(change.epoch)
        self.new.open(TRIGGER_PATIENCE)
        self.pause = time.monotonic() - began


def end_replication(
    survivor: MySQLPairSide, patience: float, check: Callable[[], None], failure: str
) -> None:
    """Let the surviving side execute the changes that it has received from the old side, and then
    end this replication. Can be repeated.

    :param patience: seconds in which the surviving side must execute the changes.
    :param check: called before each second of the wait. It raises an error if this process must not
        continue.
    :param failure: the beginning of an error's message, which says what was not done.
    :raises SwitchFailed: the surviving side does not execute the changes that it has received.
    """
    for link in survivor.links():
        survivor.stop_receiving(link)
    for link in survivor.links():
        if survivor.missing(link.received, survivor.status().current):
            survivor.execute_received(link)
        if lacking := wait_for(survivor, link.received, patience, check):
            raise SwitchFailed(
                f"{failure}: {survivor.name!r} has received {lacking}, and did"
                f" not execute it within {patience:g} s. Wait, or allow more with --patience."
            )
        survivor.stop(link.name)
        survivor.forget(link.name)
