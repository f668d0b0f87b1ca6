"""Control the replication of one server of a pair: two MariaDB servers that replicate from each
other.
"""

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

# Seconds between two queries, while this process waits for a change in the replication.
_POLL: Final = 0.02
# How long to wait, in seconds, until a server that was just started has connected to the server
# from which it replicates. By default, a server tries to connect every ten seconds.
_CONNECTING: Final = 15.0
#: The delay of replication, in seconds, for a server that must receive changes but not execute
#: them. 68 years is the longest delay that the server accepts. The server stores the delay, so it
#: is still in force after a restart. STOP SLAVE, for example, would not be.
HELD: Final = 2**31 - 1
# How many times to try to set the position from which a server receives changes. An attempt fails
# if the application writes on the server at the same time.
_ATTEMPTS: Final = 200
_OLD_POSITION: Final = 1947  # ER_MASTER_GTID_POS_CONFLICTS_WITH_BINLOG


class MySQLPairReplication(MySQLReplicationServer):
    """A connection to one server of a pair, to control its replication. For one thread only."""

    # ##### Positions #####

    def written(self) -> str:
        """Return the GTID of the last transaction that was made on this server itself, so that it
        was not received from the other one. Return "" if there is none.
        """
        return self.own_part(self.status().logged)

    def own_part(self, position: str) -> str:
        """Return the GTID that ``position`` contains for this server's own replication domain; ""
        if it contains none.

        For example, the part of ``0-1-15,1-2-7`` for a server that writes in the domain 1 is
        ``1-2-7``.

        :param position: a list of GTIDs, one per replication domain.
        """
        domain = self.status().domain
        last = positions(position).get(domain)
        return "" if last is None else f"{domain}-{last[0]}-{last[1]}"

    def transactions_after(self, position: str) -> Iterator[LoggedTransaction]:
        """Yield the transactions after ``position`` that were made on this server itself, so that
        they were not received from the other one.

        Reads the binary log in pages, from the log file that contains ``position``. Transactions in
        log files that the server has already deleted are missing.
        """
        status = self.status()
        after = positions(position).get(status.domain, (0, 0))[1]
        yield from BinaryLog(self._rows).transactions(status.domain, after)

    def continue_at(self, position: str, own: str) -> None:
        """Set the position after which this server receives changes. The replication must be
        stopped.

        :param position: the position in the log of the other server.
        :param own: the GTID of the last transaction that was made on this server itself. The other
            server has replicated this server's transactions up to ``own``, and must not send them
            back.
        """
        self._rows("SET GLOBAL gtid_slave_pos = %s", _with(position, own))

    def take_as_received(self, last: str, schema: str) -> None:
        """Mark the other server's transactions up to ``last`` as received, without executing them.

        Used if this server must never execute these transactions, but the other server will
        replicate from this one later. This works only if the log of this server contains the GTID
        ``last``. So this method logs an empty transaction with this GTID. The replication on this
        server must be stopped meanwhile. Can safely be called again.

        :param last: the GTID of the last transaction that must not be executed.
        :param schema: a schema of the pair, in which the empty transaction is logged.
        """
        if self.missing(last, self.status().logged):
            domain, server, number = last.split("-")
            try:
                self._rows(
                    "SET SESSION gtid_domain_id = %s, server_id = %s", int(domain), int(server)
                )
                # Set the number in a separate statement, after the domain. The server compares the
                # number with the last one in the domain that the session has at this moment.
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
        """Let this server receive only the changes after the position that it has reached, so that
        it receives no change a second time.

        This method reads the position, and then sets it. The server refuses the position if the
        application has written on this server in between, because the position then lacks the last
        change. In this case, the position is read again.

        :param last: the GTID of a transaction of the other server. If given, this server receives
            only changes of the other server after this transaction.
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
        # Set the position first. Otherwise the source would send this server's own changes back.
        self._receive_after_own()
        encrypted = int(bool(settings.get("OPTIONS", {}).get("ssl")))
        # Use a cursor of the driver: with DEBUG, Django logs what cursor() executes, and the
        # password must not be logged.
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
            # If the source also replicates from this server, wait until it has executed all that
            # this server has written. If the source's log lacked one of these changes now, the
            # source would refuse this server, and this server would not try again.
            source.wait_for(self.written(), _CONNECTING)
        self._rows("START SLAVE")

    def run_until(self, link: MySQLReplicationLink, position: str, seconds: float) -> bool:
        """Start the stopped replication ``link``. It stops again after it has executed all changes
        up to ``position``.

        Return False if that takes more than ``seconds``. The replication may then still run.
        """
        if self.missing(position, self.status().current):
            # The statement accepts the connection's name and the position only as literals.
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

    def link_soon(self, source: Self) -> MySQLReplicationLink | None:
        """Return the connection by which this server replicates from ``source``; None if there is
        none.

        A server that has just started does not know yet to which server its connections lead. So
        this method tries for some seconds.
        """
        deadline = time.monotonic() + _CONNECTING
        while (link := self.link_from(source)) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return link

    def hold(self, link: MySQLReplicationLink) -> None:
        """Hold back the changes that arrive by ``link``: execute none of them until :meth:`release`.

        The server still receives and keeps them. It stores the hold, so neither a restart nor
        ``START SLAVE`` ends it. Can safely be called again.
        """
        name = self._connection_name(link.name)
        if link.delay != HELD:
            # The server accepts a new delay only while the replication by this connection is
            # stopped.
            self._rows(f"STOP SLAVE {name}")
            self._set_delay(name, HELD)
        else:
            self._rows(f"STOP SLAVE {name} SQL_THREAD")
        self._rows(f"START SLAVE {name} IO_THREAD")

    def await_receiving(self, link: MySQLReplicationLink) -> None:
        """Wait until this server receives changes by ``link``, a replication that was just started.

        Return after some seconds even if it receives none.
        """
        deadline = time.monotonic() + _CONNECTING
        while time.monotonic() < deadline:
            if any(each.receives for each in self.links() if each.name == link.name):
                break
            time.sleep(_POLL)

    def release(self, link: MySQLReplicationLink) -> None:
        """End a :meth:`hold`: execute the changes that have arrived by ``link``, and all later ones.

        Can safely be called again.
        """
        if link.delay == HELD:
            name = self._connection_name(link.name)
            self._rows(f"STOP SLAVE {name}")
            self._set_delay(name, 0)
        self.resume(link)

    def execute_received(self, link: MySQLReplicationLink) -> None:
        """Execute the changes that have arrived by ``link``, even if they were held back. Receive
        no more.

        Used if the other server is dead. The file with the received changes (the relay log) may
        then be their only copy. When a stopped connection with GTID is started, or gets another
        delay, the server deletes this file, unless the statement names the file and the position in
        it. So this method names both. Can safely be called again.
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

        If its changes are held back (received, but not executed), they stay held back. Can
        safely be called again.
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
    """Return ``position`` with ``last`` in place of its GTID of the same replication domain.

    For example, ``0-1-15,1-2-7`` with the last ``0-1-16`` becomes ``1-2-7,0-1-16``.
    """
    domain = last.split("-")[0]
    others = [part for part in position.split(",") if part and part.split("-")[0] != domain]
    return ",".join([*others, last])
