"""Control the replication of one server of a master-master pair of MariaDB servers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Final, Self

from django.db import OperationalError

from sharded_orm.backends.mysql.binary_log import BinaryLog, LoggedTransaction
from sharded_orm.backends.mysql.gtids import positions
from sharded_orm.backends.mysql.replication import MySQLReplicationLink, MySQLReplicationServer
from sharded_orm.backends.snapshot import OWN_PREFIX

# Seconds between two queries that check whether the replication runs.
_POLL: Final = 0.02
# The longest wait, in seconds, until a server that was started has connected to its source. By default,
# a server tries to connect every ten seconds.
_CONNECTING: Final = 15.0
#: The delay of replication, in seconds, for a server that must not execute the changes that it
#: receives: 68 years, the longest that the server accepts. The server stores the delay, so it
#: survives a restart, unlike other settings that could stop the changes.
HELD: Final = 2**31 - 1
# The number of attempts to set a position. An attempt fails if the application writes at that moment.
_ATTEMPTS: Final = 200
_OLD_POSITION: Final = 1947  # ER_MASTER_GTID_POS_CONFLICTS_WITH_BINLOG


class MySQLPairReplication(MySQLReplicationServer):
    """A connection to one server of a pair, to control its replication. For one thread only."""

    # ##### Positions #####

    def written(self) -> str:
        """Return the position of the last event that this server itself has written; "" if none."""
        return self.own_part(self.status().logged)

    def own_part(self, position: str) -> str:
        """Return the part of the replication position ``position`` that is in this server's own
        domain.
        """
        domain = self.status().domain
        last = positions(position).get(domain)
        return "" if last is None else f"{domain}-{last[0]}-{last[1]}"

    def transactions_after(self, position: str) -> Iterator[LoggedTransaction]:
        """Yield the transactions that this server itself has logged after ``position``.

        Reads the binary log from ``position`` on, in pages. Transactions in purged files are left out.
        """
        status = self.status()
        after = positions(position).get(status.domain, (0, 0))[1]
        yield from BinaryLog(self._rows).transactions(status.domain, after)

    def continue_at(self, position: str, own: str) -> None:
        """Set the position from which this server receives. The replication must be stopped.

        :param position: the position in the log of the other side.
        :param own: the last transaction of this server itself. The server will not receive its own
            transactions up to ``own``.
        """
        self._rows("SET GLOBAL gtid_slave_pos = %s", _with(position, own))

    def take_as_received(self, last: str, schema: str) -> None:
        """Mark the other server's transactions up to ``last`` as received, without executing them.

        Use this for transactions that this server must never execute. The other server can
        replicate from this server again only if the log of this server contains their last GTID. So
        an empty transaction with this GTID is logged. This server must not replicate meanwhile. Can
        be repeated.

        :param last: the GTID of the last such transaction.
        :param schema: a schema of the pair, in which the empty transaction is logged.
        """
        if self.missing(last, self.status().logged):
            domain, server, number = last.split("-")
            try:
                self._rows(
                    "SET SESSION gtid_domain_id = %s, server_id = %s", int(domain), int(server)
                )
                # Set the number after the domain. When a number is set, the server compares it with
                # the last number of the session's present domain.
                self._rows("SET SESSION gtid_seq_no = %s", int(number))
                table = self._connection.ops.quote_name(f"{OWN_PREFIX}no_table")
                self._rows(
                    f"DROP TABLE IF EXISTS {self._connection.ops.quote_name(schema)}.{table}"
                )
            finally:
                self._rows(
                    "SET SESSION gtid_domain_id = @@GLOBAL.gtid_domain_id,"
                    " server_id = @@GLOBAL.server_id, gtid_seq_no = 0"
                )
        self._receive_after_own(last)

    def _receive_after_own(self, last: str = "") -> None:
        """Set the position from which this server receives, so that it gets no change that it has
        now.

        The server refuses a position without its own last change. If the application has written a
        change after the position was read, read it again.

        :param last: a transaction of the other side, after which its changes are received. By
            default, they are received after the last one that this server has executed.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            position = self.status().current
            try:
                self._rows(
                    "SET GLOBAL gtid_slave_pos = %s", _with(position, last) if last else position
                )
                return
            except OperationalError as exc:
                if exc.args[0] != _OLD_POSITION or attempt == _ATTEMPTS:
                    raise

    # ##### The connection to the other server #####

    def follow(self, source: Self, settings: Mapping[str, Any], account: Mapping[str, str]) -> None:
        """Start to replicate from ``source``: receive all changes that this server does not have yet.

        :param settings: the settings of the source's node, for its address.
        :param account: ``USER`` and ``PASSWORD`` of the replication account on ``source``.
        """
        # Do not receive this server's own changes back from the source.
        self._receive_after_own()
        encrypted = int(bool(settings.get("OPTIONS", {}).get("ssl")))
        # With DEBUG, Django logs what cursor() executes. The password must not be logged.
        with (
            self._connection.wrap_database_errors,
            closing(self._connection.create_cursor()) as cursor,
        ):
            cursor.execute(
                "CHANGE MASTER TO MASTER_HOST = %s, MASTER_PORT = %s, MASTER_USER = %s,"
                f" MASTER_PASSWORD = %s, MASTER_SSL = {encrypted}, MASTER_CONNECT_RETRY = 10,"
                " MASTER_USE_GTID = slave_pos",
                (
                    str(settings.get("HOST") or "localhost"),
                    int(settings.get("PORT") or self.default_port),
                    account["USER"],
                    account["PASSWORD"],
                ),
            )
        link = source.link_from(self)
        if link is not None and link.executes:
            # If the source replicates from this server, let it catch up first. It would refuse this
            # server for good if its log lacked an event that this server has written.
            source.wait_for(self.written(), _CONNECTING)
        self._rows("START SLAVE")

    def run_until(self, link: MySQLReplicationLink, position: str, seconds: float) -> bool:
        """Start the stopped replication ``link``, execute changes up to ``position``, and stop again.

        Return False if that takes more than ``seconds``. The replication may then still run.
        """
        if self.missing(position, self.status().current):
            # The name of the connection and the position must be literals.
            name, until = self._connection_name(link.name), self._connection_name(position)
            self._rows(f"START SLAVE {name} UNTIL master_gtid_pos = {until}")
            deadline = time.monotonic() + seconds
            while self._executes(link.name):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL)
        return not self.missing(position, self.status().current)

    def _executes(self, link: str) -> bool:
        return any(each.executes for each in self.links() if each.name == link)

    def link_soon(self, source: Self, seconds: float = _CONNECTING) -> MySQLReplicationLink | None:
        """Return the connection by which this server replicates from ``source``; None if there is none.

        A server that has just started does not know yet from which server a connection comes. So wait
        for up to ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while (link := self.link_from(source)) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return link

    def hold(self, link: MySQLReplicationLink) -> None:
        """Hold back the changes that arrive by ``link``: execute none of them until :meth:`release`.

        The server still receives and keeps them. It stores the hold: neither a restart nor ``START
        SLAVE`` ends it. Can be repeated.
        """
        name = self._connection_name(link.name)
        if link.delay != HELD:
            # The server accepts a new delay only while this replication is stopped.
            self._rows(f"STOP SLAVE {name}")
            self._set_delay(name, HELD)
        else:
            self._rows(f"STOP SLAVE {name} SQL_THREAD")
        self._rows(f"START SLAVE {name} IO_THREAD")

    def await_receiving(self, link: MySQLReplicationLink, seconds: float = _CONNECTING) -> None:
        """Wait until this server receives changes by ``link``, a replication that was just started.

        Return after ``seconds`` even if it receives none.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(each.receives for each in self.links() if each.name == link.name):
                break
            time.sleep(_POLL)

    def release(self, link: MySQLReplicationLink) -> None:
        """End a :meth:`hold`: execute the changes that have arrived by ``link``, and all later ones.

        Can be repeated.
        """
        if link.delay == HELD:
            name = self._connection_name(link.name)
            self._rows(f"STOP SLAVE {name}")
            self._set_delay(name, 0)
        self.resume(link)

    def execute_received(self, link: MySQLReplicationLink) -> None:
        """Execute the changes that have arrived by ``link``, even if they were held back. Receive
        no more.

        Can be repeated. The relay log (the file of received changes) may be their only copy,
        because the other server may be dead. The server deletes it if a stopped connection with
        GTID is started or gets another delay, unless the statement names the log's file and
        position.
        """
        if link.executes and link.delay != HELD:
            return
        name = self._connection_name(link.name)
        self._rows(f"STOP SLAVE {name}")
        (row,) = (
            row
            for row in self._rows("SHOW ALL SLAVES STATUS")
            if row["Connection_name"] == link.name
        )
        self._rows(
            f"CHANGE MASTER {name} TO MASTER_DELAY = 0, RELAY_LOG_FILE = %s, RELAY_LOG_POS = %s",
            str(row["Relay_Log_File"]),
            int(row["Relay_Log_Pos"]),
        )
        self._rows(f"START SLAVE {name} SQL_THREAD")

    def go_on(self, link: MySQLReplicationLink) -> None:
        """Start the replication ``link`` again if it has stopped, for example because the server
        restarted.

        If its changes are held back (received, but not executed), they stay held back. Can be
        repeated.
        """
        if link.delay == HELD:
            self.hold(link)
        elif not (link.receives and link.executes):
            self.resume(link)

    def _set_delay(self, name: str, seconds: int) -> None:
        """Set the delay of the replication connection ``name``, in seconds.

        The server writes the delay to its disk at once, so a loss of power does not undo it.
        """
        before = self._rows(
            "SELECT @@GLOBAL.sync_relay_log_info relay_log, @@GLOBAL.sync_master_info master"
        )[0]
        self._sync(1, 1)
        try:
            self._rows(f"CHANGE MASTER {name} TO MASTER_DELAY = {seconds:d}")
        finally:
            self._sync(before["relay_log"], before["master"])

    def _sync(self, relay_log: int, master: int) -> None:
        self._rows(
            f"SET GLOBAL sync_relay_log_info = {relay_log:d}, GLOBAL sync_master_info = {master:d}"
        )

    def stop_receiving(self, link: MySQLReplicationLink) -> None:
        """Stop receiving by ``link``. The server still executes what it has received."""
        self._rows(f"STOP SLAVE {self._connection_name(link.name)} IO_THREAD")

    def resume(self, link: MySQLReplicationLink) -> None:
        """Start again to receive and execute changes by ``link``."""
        self._rows(f"START SLAVE {self._connection_name(link.name)}")


def _with(position: str, last: str) -> str:
    """Return ``position`` with the GTID ``last`` in place of the GTID that has the same domain.

    A position is a list of GTIDs, one for each replication domain.
    """
    domain = last.split("-")[0]
    others = [part for part in position.split(",") if part and part.split("-")[0] != domain]
    return ",".join([*others, last])
