"""Bring back a side of a pair after its server was down.

The configuration makes a server read only when it starts, until :func:`rejoin` has brought it back.
The side may have been given up meanwhile (``shards switch --force``). Then it may have transactions
that the other side, the survivor, never received. Their rows are saved in a file, and replaced by
the rows of the survivor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sharded_orm import runtime
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.pairs import (
    replication_check,
    replication_setup,
    side_comparison,
    upgrade_state,
)
from sharded_orm.operations.pairs.pair_servers import PairServers, all_pairs, open_pair
from sharded_orm.operations.pairs.put_aside import PutAsideFile
from sharded_orm.operations.pairs.side_rows import SideRows
from sharded_orm.operations.pairs.side_switch import close_side
from sharded_orm.operations.pairs.sides import open_fence
from sharded_orm.operations.pairs.upgrade_end import last_lost_at
from sharded_orm.operations.runs import global_database, journal
from sharded_orm.operations.runs.conflicts import EVERYTHING, refuse_conflicts

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

#: The kind of the journal's runs that bring a side back.
KIND: Final = "rejoin"


@dataclass
class RejoinReport:
    """The outcome of :func:`rejoin`.

    :param was_given_up: whether the side was given up while its server was down.
    :param file: the path of the file with what only this side had; "" if there is no file.
    :param transactions: the number of transactions in the file.
    :param rows: the number of rows that differed between the sides.
    """

    node: str
    was_given_up: bool = False
    file: str = ""
    transactions: int = 0
    rows: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"ok": True, **asdict(self)}


def rejoin(
    node: str,
    *,
    folder: Path,
    timeout: float = replication_setup.TIMEOUT,
    tell: Callable[[str], None] = lambda line: None,
) -> RejoinReport:
    """Bring the side ``node`` back into its pair, and let its server take writes again.

    - If the side was not given up, it replicates again. It takes writes as soon as each side has
      executed all changes of the other.
    - If the side was given up, it gets the rows of the other side and becomes passive for all
      shards. What only this side has is first saved in a new file in ``folder``.
    - During a rolling upgrade, the server only ceases to be read only, and receives changes again.
      Changes that it must not execute yet stay unexecuted.

    After an interruption, call this again.

    :param timeout: seconds in which each server must execute the changes of the other that it does
        not have yet.
    :param tell: called after each step with a line for the operator.
    :raises PairRefused: the side cannot be brought back. The message lists all reasons.
    :raises OperationHeld: an operation on the shards is under way.

    If the side was given up, all tables of the pair are read twice on both servers.
    """
    with journal.hold_run(KIND, EVERYTHING, {"node": node}) as run:
        upgrade = upgrade_state.unfinished_run()
        # An unfinished rolling upgrade (``within``) does not count as a conflict. Otherwise a
        # server that restarts during the upgrade would stay read only until its end.
        refuse_conflicts(run, within=upgrade_state.KIND if upgrade else None)
        try:
            runtime.refresh()
            with open_pair(_other_side(node), node) as servers:
                work = _Rejoin(run, servers, folder, timeout, tell)
                if upgrade and upgrade.arguments.get("given_up") == node:
                    raise PairRefused([upgrade_state.unfinished(*upgrade.arguments["pair"])])
                if upgrade and node in upgrade.arguments["pair"]:
                    report = work.open_in_upgrade(is_held=upgrade.held)
                else:
                    report = work.run()
        except PairRefused as exc:
            # Finish the run, because an unfinished run makes other operations refuse to begin. The
            # side stays read only.
            run.finish("refused", journal.one_line(exc))
            raise
        run.finish()
    return report


def _other_side(node: str) -> str:
    pairs = [pair for pair in all_pairs() if node in pair]
    if not pairs:
        raise PairRefused(
            [f"{node!r} is no side of a pair in the topology; the pairs are {all_pairs()!r}"]
        )
    if len(pairs) > 1:
        raise PairRefused(
            [
                f"{node!r} is in several pairs, {pairs!r}, and a side receives from one other side only: leave"
                " it in one pair of the topology"
            ]
        )
    return next(name for name in pairs[0] if name != node)


class _Rejoin:
    """Brings one side back. Each step can be repeated. To be used by one thread."""

    def __init__(
        self,
        run: journal.JournalRun,
        servers: PairServers,
        folder: Path,
        timeout: float,
        tell: Callable[[str], None],
    ) -> None:
        self._run = run
        self._servers = servers
        self._survivor, self._side = servers.both
        self._folder = folder
        self._timeout = timeout
        self._tell = tell
        self._schemas = [shard.schema for shard in servers.shards]
        self.report = RejoinReport(self._side.name)

    def run(self) -> RejoinReport:
        """Bring the side back. Afterwards, the two servers replicate from each other without
        problems.
        """
        self._require_fit()
        given_up = replication_check.given_up_schemas(self._side, self._servers.shards)
        self.report.was_given_up = bool(given_up)
        self._refuse(bool(given_up))
        if given_up:
            self.close()
            # The side may have taken writes until now.
            if problems := list(self._prepared_problems()):
                raise PairRefused(problems)
            self._refuse_other_schema()
            if self._unsent():
                self.put_aside()
        self.receive()
        if given_up:
            side_comparison.compare(
                self._survivor,
                self._side,
                self._schemas,
                upgraded=True,
                timeout=self._timeout,
                check=self._run.check,
            )
            self._tell(f"{self._side.name} has the rows of {self._survivor.name}")
        self.send()
        if given_up:
            self.store_epochs()
        self._close_fences(self._servers.passive_schemas(self._side))
        self._run.check()
        self._side.unfence()
        self._tell(f"{self._side.name} is open")
        replication_check.require_sound(self._survivor.name, self._side.name)
        return self.report

    def open_in_upgrade(self, *, is_held: bool) -> RejoinReport:
        """Make the server take writes during a rolling upgrade.

        If this side had been given up, that would have ended the upgrade. So it was not given up,
        and keeps its rows.

        :param is_held: whether a process works on the upgrade. That process controls the
            replication, and may have stopped it for a comparison. So the replication is not started
            here.
        """
        self._require_fit()
        problems = [*replication_check.epoch_problems(self._servers), *self._lost_problems()]
        if problems:
            raise PairRefused(problems)
        for link in self._side.links() if not is_held else ():
            self._side.go_on(link)
        self._run.check()
        # The fences of this side need no change, because the upgrade has checked them at its start.
        # If the upgrade has stopped writes since then, it has done so by fences, and these stay
        # closed when the server takes writes again.
        self._side.unfence()
        self._tell(f"{self._side.name} is open; its rolling upgrade is not finished")
        return self.report

    def _require_fit(self) -> None:
        problems = list(replication_check.server_problems(self._servers))
        for each in () if problems else self._servers.both:
            problems += replication_check.newer_epoch_problems(each, self._servers.shards)
        if problems:
            raise PairRefused(problems)

    def _refuse(self, is_given_up: bool) -> None:
        survivor, side = self._survivor.name, self._side.name
        problems = []
        if replication_check.given_up_schemas(self._survivor, self._servers.shards):
            problems.append(
                f"{survivor!r}, the other side, was itself given up: run 'manage.py pairs rejoin"
                f" {survivor}' first"
            )
        problems += self._lost_problems()
        if is_given_up and side in global_database.nodes_beside():
            problems.append(
                f"the global database ('default') is on {side!r}, which was given up, so this command would"
                f" close it for its own journal: copy the global database to another server, such as"
                f" {survivor!r}, let DATABASES name it there, and run the command again"
            )
        if is_given_up:
            for each in self._servers.both:
                problems += replication_setup.account_problems(each)
            active = sorted({shard.group for shard in self._servers.shards if shard.node == side})
            problems += [
                f"{side!r} was given up for other shards, and is the active side of shards of {group!r}: give"
                f" these up, too ('manage.py shards switch {group} --all-from {side} --force')"
                for group in active
            ]
            problems += self._prepared_problems()
        if problems:
            raise PairRefused(problems)

    def _lost_problems(self) -> Iterator[str]:
        """Yield a problem if the side has lost transactions of its own that the survivor has
        received.
        """
        survivor, side = self._survivor, self._side
        # Read the survivor first. The side may take writes, and the survivor receives them. If the
        # side were read first, the survivor could seem to have transactions that the side lacks.
        received = [survivor.status().current, *(link.received for link in survivor.links())]
        current = side.status().current
        lost = [last for p in received if (last := side.missing(side.own_part(p), current))]
        if lost:
            yield (
                f"{side.name!r} has lost transactions of its own that {survivor.name!r} has received, up to"
                f" {lost[-1]}, as after a loss of power: give {side.name!r} up ('manage.py shards switch GROUP"
                f" --all-from {side.name} --force'), and make it anew from a copy of {survivor.name!r}"
            )

    def _prepared_problems(self) -> Iterator[str]:
        # The sides cannot be compared while a transaction is prepared, because the comparison does
        # not see its changes, and a later commit changes rows that were compared already.
        for branch in self._side.prepared_branches():
            if branch.schema in self._schemas:
                yield (
                    f"a transaction in two phases, {branch.transaction!r}, is prepared in {branch.schema!r}"
                    f" on {self._side.name!r}, which was given up: end it there (XA RECOVER, XA ROLLBACK)"
                )

    def _unsent(self) -> str:
        """Return the position of the side's last transaction in its log, if the survivor does not
        have this transaction; otherwise return "".
        """
        last = self._side.written()
        status = self._survivor.status()
        is_known = not any(self._side.missing(last, p) for p in (status.current, status.logged))
        return "" if is_known else last

    # ##### The steps #####

    def close(self) -> None:
        """Make the whole server of this side refuse writes.

        Also close the fence of each shard on it. So the shards still refuse writes when the server
        takes writes again.
        """
        self._side.fence(self._timeout)
        self._close_fences(self._schemas)
        for link in self._side.links():
            self._side.stop(link.name)
        self._tell(f"{self._side.name} refuses writes")

    def _close_fences(self, schemas: list[str]) -> None:
        for shard in self._servers.shards:
            if shard.schema in schemas:
                with open_fence(replace(shard, node=self._side.name), self._run.note) as fence:
                    close_side(fence)

    def _refuse_other_schema(self) -> None:
        """Raise an error if this side was given up during a rolling upgrade.

        The schema of such a side may differ from that of the survivor, and no check finds every
        difference, such as a missing index. So the side must be made anew from a copy of the
        survivor; after that, this method accepts it. Before the error is raised, the transactions
        that only this side has are saved in a file.
        """
        lost_at = last_lost_at(self._side.name)
        own = self._side.epochs(list(lost_at))
        if all(own.get(schema, 0) >= epoch for schema, epoch in lost_at.items()):
            return
        problem = (
            f"{self._side.name!r} was given up during a rolling upgrade, so its schema may be another: make it"
            f" anew from a copy of {self._survivor.name!r} with all of its functions"
        )
        if unsent := list(self._side.transactions_after(self._survivor.status().current)):
            file = PutAsideFile(self._folder, self._side.name, self._survivor.name)
            file.write(unsent, ())
            problem += (
                f". Its {len(unsent)} transactions that the other side lacks are in {file.path}"
            )
        raise PairRefused([problem])

    def put_aside(self) -> None:
        """Save what only the side has in a file; then give the side the rows of the survivor."""
        survivor, side = self._survivor, self._side
        if side.columns(self._schemas) != survivor.columns(self._schemas):
            raise PairRefused(
                [
                    f"{side.name!r} has transactions that {survivor.name!r} has not, and other columns:"
                    f" make {side.name!r} anew from a copy of {survivor.name!r}. Nothing was changed"
                ]
            )
        with SideRows(survivor, side, self._schemas, self._run.check) as rows:
            rows.compare()
            unsent = list(side.transactions_after(survivor.status().current))
            file = PutAsideFile(self._folder, side.name, survivor.name)
            file.write(unsent, rows.differences())
            self.report.file = str(file.path)
            self.report.transactions, self.report.rows = len(unsent), rows.count
            self._tell(
                f"{len(unsent)} transactions and {rows.count} rows that differ are put aside in {file.path}"
            )
            rows.repair()
            position = rows.position
        last = side.written()
        side.continue_at(position, last)
        survivor.take_as_received(last, self._schemas[0])

    def receive(self) -> None:
        """Make the side receive and execute what the survivor has written meanwhile."""
        self._start(self._side, self._survivor)
        self._tell(f"{self._side.name} has everything of {self._survivor.name}")

    def send(self) -> None:
        """Make the survivor receive from the side again."""
        self._start(self._survivor, self._side)
        self._tell(f"{self._survivor.name} receives from {self._side.name}")

    def _start(self, replica: MySQLPairSide, source: MySQLPairSide) -> None:
        links = replica.links()
        for link in links:
            if not (link.receives and link.executes):
                # The server may be waiting for its next attempt to connect. Stop and start the
                # replication, so that it connects at once.
                replica.stop(link.name)
                replica.resume(link)
        if not links:
            if problems := list(replication_setup.account_problems(source)):
                raise PairRefused(problems)
            replication_setup.follow(replica, source)
        replication_check.await_events(replica, source, self._timeout, self._run.check)

    def store_epochs(self) -> None:
        """Store the present epoch of each shard on the side, so that it does not count as given up
        any more.
        """
        groups = runtime.topology().groups
        for shard in self._servers.shards:
            epoch = groups[shard.group].range_of(shard.number).epoch
            with open_fence(replace(shard, node=self._side.name), self._run.note) as fence:
                fence.store_epoch(epoch)
