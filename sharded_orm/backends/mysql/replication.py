"""Query and change the replication of MariaDB servers, for a promotion (a replica replaces its
primary).

The fence of a server, which makes it refuse all writes, is its setting ``read_only``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from django.db import Error, OperationalError
from django.db.backends.mysql.base import DatabaseWrapper

from sharded_orm.backends.mysql.branches import branches_in
from sharded_orm.backends.mysql.gtids import missing, positions
from sharded_orm.backends.replication import (
    FenceTexts,
    ReplicationLink,
    ReplicationServer,
    ReplicationStatus,
    Task,
)
from sharded_orm.backends.two_phase.branch import BranchName
from sharded_orm.mysql_flavor import MySQLFlavor
from sharded_orm.topology.aliases import complete

# Privileges with which an account can write even while ``read_only`` is on. (SUPER only up to
# MariaDB 10.10.)
_WRITES_THROUGH: Final = frozenset({"ALL PRIVILEGES", "SUPER", "READ_ONLY ADMIN"})
# The privileges that the operator's account needs, by task. An account with ALL PRIVILEGES has all
# of them.
_NEEDED: Final[Mapping[Task, Sequence[str]]] = {
    "fence": ("READ_ONLY ADMIN", "BINLOG MONITOR"),
    "promote": ("READ_ONLY ADMIN", "REPLICATION SLAVE ADMIN", "SLAVE MONITOR"),
    "end": ("REPLICATION SLAVE ADMIN", "SLAVE MONITOR", "RELOAD"),
}

#: Seconds within which a server must accept the connection of the operator's account.
CONNECT_TIMEOUT: Final = 5

# Seconds to wait for an answer of the server. No statement of this module should take longer.
_READ_TIMEOUT = 60
_FILTERS = (
    "Replicate_Do_DB", "Replicate_Ignore_DB", "Replicate_Do_Table", "Replicate_Ignore_Table",
    "Replicate_Wild_Do_Table", "Replicate_Wild_Ignore_Table", "Replicate_Ignore_Server_Ids",
    "Replicate_Do_Domain_Ids", "Replicate_Ignore_Domain_Ids", "Replicate_Rewrite_DB",
)  # fmt: skip

# Error codes of the client library for a failed connection, a timeout, or a lost connection.
_NO_ANSWER = frozenset({2001, 2002, 2003, 2004, 2005, 2006, 2011, 2012, 2013, 2055})
# Error codes with which a server refuses an account: because of its name, password, host or
# authentication plugin, or because the account is locked.
_REFUSED = frozenset(
    {1044, 1045, 1130, 1251, 1275, 1524, 1698, 1820, 1862, 1873, 2049, 2054, 2058, 2059, 2061, 4151}
)  # fmt: skip
_LOCK_WAIT = 1205  # ER_LOCK_WAIT_TIMEOUT
_DENIED = 1227  # ER_SPECIFIC_ACCESS_DENIED_ERROR

# This query returns the number of replication connections that are running. It needs no privilege.
# So even an account without SLAVE MONITOR finds out that the server is a replica.
_RUNNING = (
    "SELECT variable_value FROM information_schema.global_status"
    " WHERE variable_name = 'Slaves_running'"
)
# Matches a line of SHOW GRANTS with privileges on the whole server (ON *.*), not on single schemas.
_GLOBAL_GRANT = re.compile(r"GRANT (?P<privileges>.+) ON \*\.\* TO ")


@dataclass(frozen=True)
class MySQLReplicationStatus(ReplicationStatus):
    """The state of a server's replication at one moment.

    A position in it is a list of MariaDB's GTIDs, one per replication domain: ``0-1-15,1-2-7``.
    """

    server_id: int = 0
    domain: int = 0
    writes_log: bool = False
    logs_replicated: bool = False


@dataclass(frozen=True)
class MySQLReplicationLink(ReplicationLink):
    """One connection by which a replica replicates from a source: a row of ``SHOW ALL SLAVES
    STATUS``.
    """

    #: ``server_id`` of the source, as the source last reported it; 0 if the source has never answered.
    source_id: int
    #: Whether the server is trying to reconnect to its source, after it lost the connection.
    connecting: bool
    uses_gtid: bool
    delay: int
    #: Settings that exclude events from replication, as name -> value. Empty settings are left out.
    filters: Mapping[str, str]

    @property
    def is_connected(self) -> bool:
        return bool(self.source_id)


class MySQLReplicationServer(ReplicationServer):
    """A connection to one MariaDB server, to query and change its replication.

    For a MySQL server, it only reports that this server cannot be promoted: MySQL has other
    statements for replication. The account needs no access to any schema.
    """

    product = "MariaDB"
    default_port = 3306
    texts = FenceTexts(
        name="read_only",
        is_fenced="is read only",
        fences="makes {node} read only",
        opens="lets {node} take writes",
        not_fenced="could not be made read only",
        stays_open="does not become read only",
        fenced_before="was made read only",
        opened="somebody has made {node!r} writable again",
        stays_fenced="stays read only",
        kept_off="statements are under way there, a migration or LOCK TABLES perhaps",
        intruder="a privileged account writes there",
        to_see="SLAVE MONITOR and BINLOG MONITOR",
        to_fence="SET GLOBAL read_only = ON",
        to_open="SET GLOBAL read_only = OFF",
        to_start="START SLAVE",
        to_end="RESET SLAVE ALL",
        afterwards=(
            "Set read_only in the configuration of both servers: ON for {old}, OFF for {new}. A"
            " restart forgets what was set now."
        ),
    )

    def __init__(
        self, name: str, settings: Mapping[str, Any], databases: Sequence[str] = ()
    ) -> None:
        self.name = name
        own = {
            **complete(settings),
            # Connect without a schema: the operator's account may have no access to any schema.
            "NAME": "",
            "TIME_ZONE": None,
        }
        own["OPTIONS"] = {
            **own["OPTIONS"],
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": _READ_TIMEOUT,
            "write_timeout": _READ_TIMEOUT,
        }
        self._connection = DatabaseWrapper(own, f"{name} (operator)")
        self._connection.ensure_connection()

    # ##### Queries about the state of the server #####

    def status(self) -> MySQLReplicationStatus:
        version = str(self._value("SELECT VERSION()"))
        if not MySQLFlavor.of_version(version).can_be_promoted:
            return MySQLReplicationStatus(version, "", False, "", "", can_be_promoted=False)
        (row,) = self._rows(
            "SELECT CONCAT_WS('/', @@hostname, @@port, @@server_id, @@datadir) identity,"
            " @@server_id server_id, @@gtid_domain_id domain, @@read_only read_only,"
            " @@log_bin writes_log, @@log_slave_updates logs_replicated,"
            " @@gtid_binlog_pos logged, @@gtid_current_pos current"
        )
        return MySQLReplicationStatus(
            version,
            str(row["identity"]),
            bool(row["read_only"]),
            str(row["logged"]),
            str(row["current"]),
            server_id=int(row["server_id"]),
            domain=int(row["domain"]),
            writes_log=bool(row["writes_log"]),
            logs_replicated=bool(row["logs_replicated"]),
        )

    def links(self) -> list[MySQLReplicationLink]:
        """Return the server's replication connections. Needs the privilege ``SLAVE MONITOR``."""
        return [_link(row) for row in self._rows("SHOW ALL SLAVES STATUS")]

    def link_from(self, source: Self) -> MySQLReplicationLink | None:
        number = source.status().server_id
        return next((link for link in self.links() if link.source_id == number), None)

    def replicates_from(self, source: Self) -> bool:
        """Whether this server has a replication connection to the server of ``source``.

        :raises django.db.OperationalError: this server is a replica, but the account lacks the
            privilege ``SLAVE MONITOR``, and so cannot see from which server it replicates.
        """
        try:
            return self.link_from(source) is not None
        except OperationalError as exc:
            if _code(exc) == _DENIED and self._value(_RUNNING) == "0":
                return False
            raise

    def _privileges(self) -> set[str]:
        """Return the privileges on the whole server that the account has itself or through one of
        its roles.

        The role ``PUBLIC`` is one of them. A role counts even if it is not active in this session.
        """
        return {
            privilege
            for line in self._grant_lines()
            if (match := _GLOBAL_GRANT.match(line))
            for privilege in match["privileges"].split(", ")
        }

    def _grant_lines(self) -> list[str]:
        """Return the lines of ``SHOW GRANTS`` for the account and for all its roles."""
        roles = self._rows(
            "SELECT DISTINCT ROLE_NAME name FROM information_schema.applicable_roles"
        )
        quote = self._connection.ops.quote_name
        queries = ["SHOW GRANTS", *(f"SHOW GRANTS FOR {quote(row['name'])}" for row in roles)]
        return [line for sql in queries for line in self._grants(sql)]

    def _grants(self, sql: str) -> list[str]:
        return [str(value) for row in self._rows(sql) for value in row.values()]

    def schemas(self) -> set[str]:
        rows = self._rows("SELECT SCHEMA_NAME name FROM information_schema.SCHEMATA")
        return {str(row["name"]) for row in rows}

    def _log_filters(self) -> dict[str, str]:
        """Return the settings that keep some events out of the binary log, as a dict name -> value.

        Empty settings are left out. Needs the privilege ``BINLOG MONITOR``.
        """
        rows = self._rows("SHOW MASTER STATUS")
        names = ("Binlog_Do_DB", "Binlog_Ignore_DB")
        return {name: row[name] for row in rows for name in names if row[name]}

    def idle_seconds(self) -> float | None:
        """Return for how many seconds the replica has had nothing left to execute.

        Return None if it still executes events, or if replication is stopped. Also return None if
        the account lacks the privilege ``PROCESS``: the server then hides its replication threads.
        """
        rows = self._rows(
            "SELECT TIME_MS milliseconds FROM information_schema.PROCESSLIST"
            " WHERE COMMAND = 'Slave_SQL' AND STATE LIKE 'Slave has read all relay log%%'"
        )
        return min((float(row["milliseconds"]) / 1000 for row in rows), default=None)

    def prepared_branches(self) -> list[BranchName]:
        return branches_in(list(row.values()) for row in self._rows("XA RECOVER"))

    # ##### Reasons against a promotion #####

    def privilege_problems(self, task: Task) -> Iterator[str]:
        granted = self._privileges()
        lacking = (
            []
            if "ALL PRIVILEGES" in granted
            else [privilege for privilege in _NEEDED[task] if privilege not in granted]
        )
        if lacking:
            yield (
                f"the OPERATOR account of node {self.name!r} lacks a privilege; there, run"
                f" GRANT {', '.join(lacking)} ON *.* TO that account"
            )

    def source_problems(self) -> Iterator[str]:
        if not self.status().writes_log:
            yield f"{self.name!r} writes no binary log (log_bin): nothing replicates it"
        for name, value in self._log_filters().items():
            yield f"{self.name!r} does not log everything ({name} = {value!r}): rows would be lost"

    def replica_problems(self, source: Self, link: ReplicationLink) -> Iterator[str]:
        old, new = source.status(), self.status()
        server, number = positions(new.logged).get(old.domain, (0, 0))
        if server == new.server_id and number > positions(old.logged).get(old.domain, (0, 0))[1]:
            yield (
                f"{self.name!r} has written by itself what {source.name!r} does not have (event"
                f" {old.domain}-{server}-{number}): the two differ. Make the replica anew"
            )

    def link_problems(self, link: ReplicationLink) -> Iterator[str]:
        assert isinstance(link, MySQLReplicationLink)
        if not link.uses_gtid:
            yield f"{self.name!r} replicates without GTID: CHANGE MASTER TO MASTER_USE_GTID = slave_pos"
        for name, value in link.filters.items():
            yield (
                f"{self.name!r} does not replicate everything ({name} = {value!r}): rows would be lost."
                " Remove the filter"
            )
        if link.delay:
            yield f"{self.name!r} replicates {link.delay} s later on purpose (MASTER_DELAY): set it to 0"

    def warnings(self, task: Task) -> Iterator[str]:
        status = self.status()
        if task == "promote" and not (status.writes_log and status.logs_replicated):
            yield (
                f"{self.name!r} writes no binary log of what it replicates (log_bin,"
                " log_slave_updates): no other server can replicate from it afterwards"
            )

    def application_problems(self, account: str) -> Iterator[str]:
        privileges = sorted(self._privileges() & _WRITES_THROUGH)
        if privileges:
            yield (
                f"{account} of node {self.name!r} may write through read_only"
                f" ({', '.join(privileges)}): it could go on writing to the old primary. Give the"
                " application an account with privileges on its schemas only"
            )

    def split_problems(self, source: Self) -> Iterator[str]:
        old, new = source.status(), self.status()
        if new.read_only:
            yield (
                f"{self.name!r} is read only, and the application will write there while it still"
                " replicates: SET GLOBAL read_only = OFF, and so in its configuration"
            )
        if old.domain == new.domain:
            yield (
                f"{source.name!r} and {self.name!r} have the same gtid_domain_id ({new.domain}), and"
                f" both will write: give {self.name!r} another one (SET GLOBAL gtid_domain_id = …, and"
                " so in its configuration)"
            )

    # ##### Changes #####

    def fence(self, patience: float) -> None:
        """Make the server refuse all writes except those of privileged accounts (``read_only``).

        When this method returns, no commit is running any more. Transactions that have written and
        are still open cannot be committed: their ``COMMIT`` is refused.

        :param patience: seconds to wait for running statements to end. During the wait, new
            statements are blocked.
        :raises django.db.OperationalError: statements ran for longer than ``patience``. Nothing has
            changed.
        """
        self._rows("SET SESSION lock_wait_timeout = %s", max(1, int(patience)))
        self._rows("SET GLOBAL read_only = ON")

    def unfence(self) -> None:
        self._rows("SET GLOBAL read_only = OFF")

    def written_since(self, position: str) -> str:
        return missing(self.status().logged, position)

    def wait_for_source(self, source: Self, seconds: float) -> bool:
        status = source.status()
        # Wait only for the events of the domain in which the source itself writes. If the source
        # replicates from another server, its log also contains that server's events, in other
        # domains.
        last = positions(status.logged).get(status.domain)
        return last is None or self.wait_for(f"{status.domain}-{last[0]}-{last[1]}", seconds)

    def wait_for(self, position: str, seconds: float) -> bool:
        return bool(self._value("SELECT MASTER_GTID_WAIT(%s, %s)", position, seconds) == 0)

    def stop(self, link: str) -> None:
        self._rows(f"STOP SLAVE {self._connection_name(link)}")

    def start(self, link: str) -> None:
        self._rows(f"START SLAVE {self._connection_name(link)}")

    def forget(self, link: str) -> None:
        self._rows(f"RESET SLAVE {self._connection_name(link)} ALL")

    def _connection_name(self, link: str) -> str:
        # MariaDB's grammar accepts the connection's name only as a string literal: neither as a
        # parameter nor as a quoted identifier.
        return str(self._connection.connection.literal(link).decode())

    # ##### Positions and errors #####

    missing = staticmethod(missing)

    @staticmethod
    def has_no_answer(exc: Error) -> bool:
        return _code(exc) in _NO_ANSWER

    @staticmethod
    def is_kept_off(exc: Error) -> bool:
        return _code(exc) == _LOCK_WAIT

    @staticmethod
    def why_no_session(node: str, account: str, exc: Error) -> str:
        if _code(exc) in _NO_ANSWER:
            return f"node {node!r} does not answer: {exc}"
        if _code(exc) in _REFUSED:
            return f"node {node!r} refuses {account}: {exc}"
        return f"node {node!r} answers, and gives {account} no session: {exc}"


def _link(row: Mapping[str, Any]) -> MySQLReplicationLink:
    errors = [str(row[name]) for name in ("Last_IO_Error", "Last_SQL_Error") if row[name]]
    behind = row["Seconds_Behind_Master"]
    return MySQLReplicationLink(
        name=str(row["Connection_name"]),
        host=str(row["Master_Host"]),
        port=int(row["Master_Port"]),
        source_id=int(row["Master_Server_Id"]),
        receives=row["Slave_IO_Running"] == "Yes",
        connecting=row["Slave_IO_Running"] == "Connecting",
        executes=row["Slave_SQL_Running"] == "Yes",
        uses_gtid=row["Using_Gtid"] != "No",
        received=str(row["Gtid_IO_Pos"]),
        executed=str(row["Gtid_Slave_Pos"]),
        seconds_behind=None if behind is None else int(behind),
        delay=int(row["SQL_Delay"] or 0),
        filters={name: str(row[name]) for name in _FILTERS if row.get(name)},
        error="; ".join(errors),
    )


def _code(exc: Error) -> object:
    return exc.args[0] if exc.args else None
