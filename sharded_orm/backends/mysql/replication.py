"""Questions and commands about MariaDB's replication, and the fence, which makes a server refuse
writes.

Management commands use this module with an operator's account. Each :class:`ReplicationServer` opens a
connection outside of any session pool, because its statements are about the whole server and must not
wait until the application releases a session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from django.db import Error, OperationalError

from sharded_orm.mysql_flavor import MySQLFlavor
from sharded_orm.topology.aliases import complete

#: Privileges that let an account write although ``read_only`` is on. SUPER does so up to MariaDB 10.10.
WRITES_THROUGH: Final = frozenset({"ALL PRIVILEGES", "SUPER", "READ_ONLY ADMIN"})
#: Privileges that the operator's account needs on the old primary, to fence it (make it refuse writes).
#: An account with ALL PRIVILEGES has them.
TO_FENCE: Final = ("READ_ONLY ADMIN", "BINLOG MONITOR")
#: Privileges that the operator's account needs on a server that becomes the new primary. An account
#: with ALL PRIVILEGES has them.
TO_PROMOTE: Final = ("READ_ONLY ADMIN", "REPLICATION SLAVE ADMIN", "SLAVE MONITOR")
#: Privileges that the operator's account needs on a replica that replicates no longer after a split.
TO_END: Final = ("REPLICATION SLAVE ADMIN", "SLAVE MONITOR", "RELOAD")

_CONNECT_TIMEOUT = 5  # seconds
# Seconds to wait for an answer of the server. No statement of this module takes longer.
_READ_TIMEOUT = 60
_FILTERS = (
    "Replicate_Do_DB", "Replicate_Ignore_DB", "Replicate_Do_Table", "Replicate_Ignore_Table",
    "Replicate_Wild_Do_Table", "Replicate_Wild_Ignore_Table", "Replicate_Ignore_Server_Ids",
    "Replicate_Do_Domain_Ids", "Replicate_Ignore_Domain_Ids", "Replicate_Rewrite_DB",
)  # fmt: skip
#: Error codes of the client library for no connection, a timeout, or a lost connection.
_NO_ANSWER = frozenset({2001, 2002, 2003, 2004, 2005, 2006, 2011, 2012, 2013, 2055})
#: Error codes with which a server refuses an account: because of its name, password, host or
#: authentication plugin, or because the account is locked.
_REFUSED = frozenset(
    {1044, 1045, 1130, 1251, 1275, 1524, 1698, 1820, 1862, 1873, 2049, 2054, 2058, 2059, 2061, 4151}
)  # fmt: skip
_LOCK_WAIT = 1205  # ER_LOCK_WAIT_TIMEOUT
_DENIED = 1227  # ER_SPECIFIC_ACCESS_DENIED_ERROR
# How many replication connections run. Every account may ask.
_RUNNING = (
    "SELECT variable_value FROM information_schema.global_status"
    " WHERE variable_name = 'Slaves_running'"
)
# Matches a line of SHOW GRANTS about the whole server (ON *.*). Grants on single schemas do not count.
_GLOBAL_GRANT = re.compile(r"GRANT (?P<privileges>.+) ON \*\.\* TO ")


@dataclass(frozen=True)
class ReplicationStatus:
    """The state of a server's replication at one moment.

    ``logged`` and ``current`` are positions. A position is a list of MariaDB's GTIDs, one per
    replication domain: ``0-1-15,1-2-7``.
    """

    version: str
    #: Identity of the server. No two servers have the same identity. It does not depend on the
    #: address by which the server is reached.
    identity: str
    server_id: int
    domain: int
    read_only: bool
    writes_log: bool
    logs_replicated: bool
    #: Position of the last event in the binary log: one GTID per replication domain.
    logged: str
    #: Position of the last event that replication has executed or that the server itself has written.
    current: str

    @property
    def can_be_promoted(self) -> bool:
        """Whether this module knows the server's statements. False for MySQL."""
        return MySQLFlavor.of_version(self.version).can_be_promoted


@dataclass(frozen=True)
class ReplicationLink:
    """A server's replication connection to its source: a row of ``SHOW ALL SLAVES STATUS``."""

    name: str
    host: str
    port: int
    #: ``server_id`` of the source, as the source last reported it; 0 if the source has never answered.
    source_id: int
    receives: bool
    #: Whether the server is trying to reconnect to its source, after it lost the connection.
    connecting: bool
    executes: bool
    uses_gtid: bool
    #: Position of the last event that has arrived from the source.
    received: str
    #: Position of the last event from the source that this server has executed.
    executed: str
    #: Seconds by which the server is behind its source; None if the server does not receive or
    #: execute events now.
    seconds_behind: int | None
    delay: int
    #: Settings that exclude events from replication, as name -> value. Settings without a value are left
    #: out.
    filters: Mapping[str, str]
    error: str


class ReplicationServer:
    """A connection to one server with the operator's account. For one thread only.

    As a context manager, it closes the connection at the end of the block.

    :param name: name of the node, for messages.
    :param settings: the node's settings with the operator's account, like an entry of ``DATABASES``.
    :raises django.db.Error: the server does not answer within 5 seconds, or refuses the account.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        # Imported here because Django's backend needs the MySQL driver, and projects without MySQL
        # import this module too, through the management commands.
        from django.db.backends.mysql.base import DatabaseWrapper

        self.name = name
        own = {
            **complete(settings),
            # Connect without a schema: the operator's account may have no access to any schema.
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

    # ##### Questions about the state of the server #####

    def status(self) -> ReplicationStatus:
        """Return the state of the server. Two round trips.

        If the server cannot be promoted, only the version is filled in, and the second round trip is
        saved.
        """
        version = str(self._value("SELECT VERSION()"))
        if not MySQLFlavor.of_version(version).can_be_promoted:
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
        """Return the server's replication connections. Needs the privilege ``SLAVE MONITOR``."""
        return [_link(row) for row in self._rows("SHOW ALL SLAVES STATUS")]

    def replicates_from(self, server_id: int) -> bool:
        """Whether the server has a replication connection to the server with that ``server_id``.

        :raises django.db.OperationalError: a connection runs, and the account lacks ``SLAVE MONITOR``.
        """
        try:
            links = self.links()
        except OperationalError as exc:
            if _code(exc) == _DENIED and self._value(_RUNNING) == "0":
                return False
            raise
        return any(link.source_id == server_id for link in links)

    def privileges(self) -> set[str]:
        """Return the account's privileges on the whole server, including the privileges of its roles.

        Roles that are not active in this session are included, and so is the role ``PUBLIC``.
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
        """Return the names of the schemas that the account may see."""
        rows = self._rows("SELECT SCHEMA_NAME name FROM information_schema.SCHEMATA")
        return {str(row["name"]) for row in rows}

    def log_filters(self) -> dict[str, str]:
        """Return the settings that exclude events from the binary log, as name -> value.

        Settings without a value are left out. Needs the privilege ``BINLOG MONITOR``.
        """
        rows = self._rows("SHOW MASTER STATUS")
        names = ("Binlog_Do_DB", "Binlog_Ignore_DB")
        return {name: row[name] for row in rows for name in names if row[name]}

    def idle_seconds(self) -> float | None:
        """Return for how many seconds replication has had no event left to execute.

        Return None if replication is busy or stopped. Also return None if the account lacks the
        privilege ``PROCESS``: the server then hides its replication threads.
        """
        rows = self._rows(
            "SELECT TIME_MS milliseconds FROM information_schema.PROCESSLIST"
            " WHERE COMMAND = 'Slave_SQL' AND STATE LIKE 'Slave has read all relay log%%'"
        )
        return min((float(row["milliseconds"]) / 1000 for row in rows), default=None)

    # ##### Changes #####

    def fence(self, patience: float) -> None:
        """Make the server refuse all writes except those of privileged accounts (``read_only``).

        If a transaction is open now, its ``COMMIT`` will be refused. When this method returns, no
        commit is running any more.

        :param patience: seconds to wait for running statements to end. During the wait, new statements
            are blocked.
        :raises django.db.OperationalError: the running statements took longer. Nothing has changed.
        """
        self._rows("SET SESSION lock_wait_timeout = %s", max(1, int(patience)))
        self._rows("SET GLOBAL read_only = ON")

    def unfence(self) -> None:
        self._rows("SET GLOBAL read_only = OFF")

    def wait_for(self, position: str, seconds: float) -> bool:
        """Wait until replication has executed ``position``. Return False if that takes more than
        ``seconds``.
        """
        return bool(self._value("SELECT MASTER_GTID_WAIT(%s, %s)", position, seconds) == 0)

    def stop(self, link: str) -> None:
        """Stop the replication connection named ``link``. Does nothing if it is stopped already."""
        self._rows(f"STOP SLAVE {self._connection_name(link)}")

    def start(self, link: str) -> None:
        """Start the replication connection named ``link``. Does nothing if it runs already."""
        self._rows(f"START SLAVE {self._connection_name(link)}")

    def forget(self, link: str) -> None:
        """Remove the stopped replication connection named ``link``."""
        self._rows(f"RESET SLAVE {self._connection_name(link)} ALL")

    def _connection_name(self, link: str) -> str:
        # In MariaDB's grammar, the connection's name must be a string literal. Parameters and
        # quoted names are not allowed.
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
    """Whether ``exc`` means that the server gave no answer, or an incomplete one.

    False if the server refused the account or if TLS failed: in both cases the server has answered.
    """
    return _code(exc) in _NO_ANSWER


def is_kept_off(exc: Error) -> bool:
    """Whether ``exc`` means that a statement gave up waiting for a lock."""
    return _code(exc) == _LOCK_WAIT


def why_no_session(node: str, account: str, exc: Error) -> str:
    """Return a sentence that explains why ``account`` could not open a session on ``node``.

    :param account: words for the account and its purpose, such as ``the OPERATOR account 'root'``.
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
    """Parse a position: a list of GTIDs, one per replication domain, such as ``0-1-15,1-2-7``.

    Return a dict: domain -> (server id, sequence number) of the domain's last event.
    """
    parts = (part.strip().split("-") for part in text.split(",") if part.strip())
    return {int(domain): (int(server), int(number)) for domain, server, number in parts}


def missing(wanted: str, have: str) -> str:
    """Return those GTIDs of the position ``wanted`` that lie beyond the position ``have``.

    The result is a text like ``wanted``. It is "" if no GTID of ``wanted`` lies beyond ``have``.
    """
    reached = positions(have)
    return ",".join(
        f"{domain}-{server}-{number}"
        for domain, (server, number) in sorted(positions(wanted).items())
        if reached.get(domain, (0, 0))[1] < number
    )
