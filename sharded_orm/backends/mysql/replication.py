"""MariaDB's replication, and the fence against writes, for the account of an operator.

Each :class:`ReplicationServer` has a connection outside of any pool: its statements are about the
server as a whole, and must not wait for those of the application.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from django.db import Error

from sharded_orm.topology.aliases import complete

#: Privileges to write in spite of ``read_only``; SUPER is one up to MariaDB 10.10.
WRITES_THROUGH: Final = frozenset({"ALL PRIVILEGES", "SUPER", "READ_ONLY ADMIN"})
#: Privileges of an operator on the old primary and on the new one; ALL PRIVILEGES contains them.
TO_FENCE: Final = ("READ_ONLY ADMIN", "BINLOG MONITOR")
TO_PROMOTE: Final = ("READ_ONLY ADMIN", "REPLICATION SLAVE ADMIN", "SLAVE MONITOR")

_CONNECT_TIMEOUT = 5  # seconds
# Seconds; longer than any single statement waits.
_READ_TIMEOUT = 60
_FILTERS = (
    "Replicate_Do_DB", "Replicate_Ignore_DB", "Replicate_Do_Table", "Replicate_Ignore_Table",
    "Replicate_Wild_Do_Table", "Replicate_Wild_Ignore_Table", "Replicate_Ignore_Server_Ids",
    "Replicate_Do_Domain_Ids", "Replicate_Ignore_Domain_Ids", "Replicate_Rewrite_DB",
)  # fmt: skip
#: Errors of the client: no connection, none in time, or a lost one.
_NO_ANSWER = frozenset({2001, 2002, 2003, 2004, 2005, 2006, 2011, 2012, 2013, 2055})
#: Errors with which a server refuses an account, by its name, password, host, plugin or a lock.
_REFUSED = frozenset(
    {1044, 1045, 1130, 1251, 1275, 1524, 1698, 1820, 1862, 1873, 2049, 2054, 2058, 2059, 2061, 4151}
)  # fmt: skip
_LOCK_WAIT = 1205  # ER_LOCK_WAIT_TIMEOUT
# GRANT a, b (columns) ON *.* TO …: only privileges on all schemas are about the server.
_GLOBAL_GRANT = re.compile(r"GRANT (?P<privileges>.+) ON \*\.\* TO ")


@dataclass(frozen=True)
class ReplicationStatus:
    """The state of a server at one moment. Positions are MariaDB's text: ``0-1-15,1-2-7``."""

    version: str
    #: Different for any two servers, and the same by all addresses of one.
    identity: str
    server_id: int
    domain: int
    read_only: bool
    writes_log: bool
    logs_replicated: bool
    #: Last event in the binary log, per domain.
    logged: str
    #: Last event that replication has executed or the server itself has written.
    current: str

    @property
    def is_mariadb(self) -> bool:
        return "mariadb" in self.version.lower()


@dataclass(frozen=True)
class ReplicationLink:
    """A replication connection of a server to another: a row of ``SHOW ALL SLAVES STATUS``."""

    name: str
    host: str
    port: int
    #: ``server_id`` of the source when it last answered; 0 before the first time.
    source_id: int
    receives: bool
    #: It is reconnecting: the source is gone.
    connecting: bool
    executes: bool
    uses_gtid: bool
    #: Last event that has arrived, and last that was executed.
    received: str
    executed: str
    #: None without a connection.
    seconds_behind: int | None
    delay: int
    #: Settings that leave out events, with their values.
    filters: Mapping[str, str]
    error: str


class ReplicationServer:
    """A connection of an account to a server; a context manager. For one thread.

    :param name: the node, for messages.
    :param settings: of the node, with the account, as an entry of ``DATABASES``.
    :raises django.db.Error: the server does not answer within 5 seconds, or refuses the account.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        # Imported here: it needs the driver, and projects without MySQL import this module with
        # the commands.
        from django.db.backends.mysql.base import DatabaseWrapper

        self.name = name
        own = {
            **complete(settings),
            # An operator's account need not see any schema.
            "NAME": "",
            "TIME_ZONE": None,
        }
        own["OPTIONS"] = {
            **own["OPTIONS"],
            "connect_timeout": _CONNECT_TIMEOUT,
            "read_timeout": _READ_TIMEOUT,
            "write_timeout": _READ_TIMEOUT,
        }
        self._connection = DatabaseWrapper(own, f"{name} (operator)")
        self._connection.ensure_connection()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def _rows(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def _value(self, sql: str, *parameters: Any) -> Any:
        (row,) = self._rows(sql, *parameters)
        (value,) = row.values()
        return value

    # ##### Its state #####

    def status(self) -> ReplicationStatus:
        """Return the state of the server. Two round trips.

        One round trip if the server is not MariaDB; then only the version is set.
        """
        version = str(self._value("SELECT VERSION()"))
        if "mariadb" not in version.lower():
            return ReplicationStatus(version, "", 0, 0, False, False, False, "", "")
        (row,) = self._rows(
            "SELECT CONCAT_WS('/', @@hostname, @@port, @@server_id, @@datadir) identity,"
            " @@server_id server_id, @@gtid_domain_id domain, @@read_only read_only,"
            " @@log_bin writes_log, @@log_slave_updates logs_replicated,"
            " @@gtid_binlog_pos logged, @@gtid_current_pos current"
        )
        return ReplicationStatus(
            version,
            str(row["identity"]),
            int(row["server_id"]),
            int(row["domain"]),
            bool(row["read_only"]),
            bool(row["writes_log"]),
            bool(row["logs_replicated"]),
            str(row["logged"]),
            str(row["current"]),
        )

    def links(self) -> list[ReplicationLink]:
        """Return the connections to sources; needs ``SLAVE MONITOR``."""
        return [_link(row) for row in self._rows("SHOW ALL SLAVES STATUS")]

    def privileges(self) -> set[str]:
        """Return the account's privileges on the whole server, those of its roles among them.

        Roles that a session has to activate count, and so does ``PUBLIC``.
        """
        texts = [self._grants("SHOW GRANTS")]
        roles = self._rows(
            "SELECT DISTINCT ROLE_NAME name FROM information_schema.applicable_roles"
        )
        quote = self._connection.ops.quote_name
        texts += [self._grants(f"SHOW GRANTS FOR {quote(row['name'])}") for row in roles]
        return {
            privilege
            for text in texts
            for line in text
            if (match := _GLOBAL_GRANT.match(line))
            for privilege in match["privileges"].split(", ")
        }

    def _grants(self, sql: str) -> list[str]:
        return [str(value) for row in self._rows(sql) for value in row.values()]

    def schemas(self) -> set[str]:
        """Return the schemas that the account may see."""
        rows = self._rows("SELECT SCHEMA_NAME name FROM information_schema.SCHEMATA")
        return {str(row["name"]) for row in rows}

    def log_filters(self) -> dict[str, str]:
        """Return settings that keep events out of the binary log; needs ``BINLOG MONITOR``."""
        rows = self._rows("SHOW MASTER STATUS")
        names = ("Binlog_Do_DB", "Binlog_Ignore_DB")
        return {name: row[name] for row in rows for name in names if row[name]}

    def idle_seconds(self) -> float | None:
        """Return seconds since replication executed its last event; None if they are not known.

        Needs ``PROCESS``, without which threads of the server are hidden.
        """
        rows = self._rows(
            "SELECT TIME_MS milliseconds FROM information_schema.PROCESSLIST"
            " WHERE COMMAND = 'Slave_SQL' AND STATE LIKE 'Slave has read all relay log%%'"
        )
        return min((float(row["milliseconds"]) / 1000 for row in rows), default=None)

    # ##### Changes #####

    def fence(self, patience: float) -> None:
        """Refuse all writes but those of privileged accounts from now on.

        An open transaction is refused at its ``COMMIT``. When this method returns, no commit is
        running any more.

        :param patience: seconds to wait for running statements; others queue up behind the fence.
        :raises django.db.OperationalError: they took longer; nothing has changed.
        """
        self._rows("SET SESSION lock_wait_timeout = %s", max(1, int(patience)))
        self._rows("SET GLOBAL read_only = ON")

    def unfence(self) -> None:
        self._rows("SET GLOBAL read_only = OFF")

    def wait_for(self, position: str, seconds: float) -> bool:
        """Wait until replication has executed ``position``; False after ``seconds``."""
        return bool(self._value("SELECT MASTER_GTID_WAIT(%s, %s)", position, seconds) == 0)

    def stop(self, link: str) -> None:
        """Stop a replication connection; no error if it is stopped."""
        self._rows(f"STOP SLAVE {self._connection_name(link)}")

    def start(self, link: str) -> None:
        """Start a replication connection; no error if it runs."""
        self._rows(f"START SLAVE {self._connection_name(link)}")

    def _connection_name(self, link: str) -> str:
        # The grammar wants a literal here, neither a parameter nor a quoted name.
        return str(self._connection.connection.literal(link).decode())


def _link(row: Mapping[str, Any]) -> ReplicationLink:
    errors = [str(row[name]) for name in ("Last_IO_Error", "Last_SQL_Error") if row[name]]
    behind = row["Seconds_Behind_Master"]
    return ReplicationLink(
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


# ##### Errors #####


def has_no_answer(exc: Error) -> bool:
    """Whether ``exc`` is an error of the connection: no answer, or an incomplete one.

    A server that refuses an account has answered, and so has one with which TLS fails.
    """
    return _code(exc) in _NO_ANSWER


def is_kept_off(exc: Error) -> bool:
    """Whether a statement gave up waiting for a lock."""
    return _code(exc) == _LOCK_WAIT


def why_no_session(node: str, account: str, exc: Error) -> str:
    """Return a sentence about why ``account`` gets no session on ``node``.

    :param account: with its role, such as ``the OPERATOR account 'root'``.
    """
    if has_no_answer(exc):
        return f"node {node!r} does not answer: {exc}"
    if _code(exc) in _REFUSED:
        return f"node {node!r} refuses {account}: {exc}"
    return f"node {node!r} answers, and gives {account} no session: {exc}"


def _code(exc: Error) -> object:
    return exc.args[0] if exc.args else None


# ##### Positions #####


def positions(text: str) -> dict[int, tuple[int, int]]:
    """Parse a position: domain -> server and sequence number of its last event."""
    parts = (part.strip().split("-") for part in text.split(",") if part.strip())
    return {int(domain): (int(server), int(number)) for domain, server, number in parts}


def missing(wanted: str, have: str) -> str:
    """Return the part of the position ``wanted`` that ``have`` has not reached; "" if none."""
    reached = positions(have)
    return ",".join(
        f"{domain}-{server}-{number}"
        for domain, (server, number) in sorted(positions(wanted).items())
        if reached.get(domain, (0, 0))[1] < number
    )
