"""MariaDB's replication and its fence, as an operator's account sees them.

One connection per :class:`ReplicationServer`, apart from every pool: what is asked and set here is about
the server as a whole, and must not wait for a statement of the application.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from django.db import Error

from sharded_orm.topology.aliases import complete

#: Privileges by which an account writes through ``read_only``. SUPER does up to MariaDB 10.10.
WRITES_THROUGH: Final = frozenset({"ALL PRIVILEGES", "SUPER", "READ_ONLY ADMIN"})
#: What an operator's account needs on the old primary, and on the new one; ALL PRIVILEGES will do.
TO_FENCE: Final = ("READ_ONLY ADMIN", "BINLOG MONITOR")
TO_PROMOTE: Final = ("READ_ONLY ADMIN", "REPLICATION SLAVE ADMIN", "SLAVE MONITOR")

_CONNECT_TIMEOUT = 5  # seconds
# Longer than anything that is waited for in one statement.
_READ_TIMEOUT = 60
_FILTERS = (
    "Replicate_Do_DB", "Replicate_Ignore_DB", "Replicate_Do_Table", "Replicate_Ignore_Table",
    "Replicate_Wild_Do_Table", "Replicate_Wild_Ignore_Table", "Replicate_Ignore_Server_Ids",
    "Replicate_Do_Domain_Ids", "Replicate_Ignore_Domain_Ids", "Replicate_Rewrite_DB",
)  # fmt: skip
#: Errors of the client: no connection, none in time, or one that was lost.
_NO_ANSWER = frozenset({2001, 2002, 2003, 2004, 2005, 2006, 2011, 2012, 2013, 2055})
#: Errors by which a server refuses an account: its name, password, host, plugin or a lock.
_REFUSED = frozenset(
    {1044, 1045, 1130, 1251, 1275, 1524, 1698, 1820, 1862, 1873, 2049, 2054, 2058, 2059, 2061, 4151}
)  # fmt: skip
_LOCK_WAIT = 1205  # ER_LOCK_WAIT_TIMEOUT
# GRANT a, b (columns) ON *.* TO …: only what holds for all schemas tells about the server.
_GLOBAL_GRANT = re.compile(r"GRANT (?P<privileges>.+) ON \*\.\* TO ")


@dataclass(frozen=True)
class ReplicationStatus:
    """How a server is at one moment. Positions are MariaDB's text: ``0-1-15,1-2-7``."""

    version: str
    #: What no two servers share, whatever addresses lead to them.
    identity: str
    server_id: int
    domain: int
    read_only: bool
    writes_log: bool
    logs_replicated: bool
    #: Last event in the binary log, per domain.
    logged: str
    #: Last event that replication has executed, or the server has written itself.
    current: str

    @property
    def is_mariadb(self) -> bool:
        return "mariadb" in self.version.lower()


@dataclass(frozen=True)
class ReplicationLink:
    """One replication of a server from another: a row of ``SHOW ALL SLAVES STATUS``."""

    name: str
    host: str
    port: int
    #: ``server_id`` of the one it replicates from, as it told when it last answered; 0 before.
    source_id: int
    receives: bool
    #: The connection is being made again: the other side is gone.
    connecting: bool
    executes: bool
    uses_gtid: bool
    #: Last event that has arrived, and that was executed.
    received: str
    executed: str
    #: None while it is not connected.
    seconds_behind: int | None
    delay: int
    #: Settings that leave out events, with what they say.
    filters: Mapping[str, str]
    error: str


class ReplicationServer:
    """A server that an account is logged in to. Use as a context manager; of one thread.

    :param name: of the node, for messages.
    :param settings: of the node with the account, as an entry of ``DATABASES``.
    :raises django.db.Error: it does not answer within 5 seconds, or refuses the account.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        # Here and not above: it needs the driver, and the commands that come by this module are
        # those of every project.
        from django.db.backends.mysql.base import DatabaseWrapper

        self.name = name
        own = {
            **complete(settings),
            # No schema: an operator's account need not see any.
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

    # ##### What it tells #####

    def standing(self) -> ReplicationStatus:
        """One round trip for MariaDB; of another server only its version (two round trips)."""
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
        """What the server replicates from; needs ``SLAVE MONITOR``."""
        return [_link(row) for row in self._rows("SHOW ALL SLAVES STATUS")]

    def privileges(self) -> set[str]:
        """The account's privileges on the whole server, by its roles as well.

        Also those of roles that a session has to ask for, and of ``PUBLIC``.
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
        """The schemas that the account may see."""
        rows = self._rows("SELECT SCHEMA_NAME name FROM information_schema.SCHEMATA")
        return {str(row["name"]) for row in rows}

    def log_filters(self) -> dict[str, str]:
        """Settings that keep events out of the binary log; needs ``BINLOG MONITOR``."""
        rows = self._rows("SHOW MASTER STATUS")
        names = ("Binlog_Do_DB", "Binlog_Ignore_DB")
        return {name: row[name] for row in rows for name in names if row[name]}

    def idle_seconds(self) -> float | None:
        """Seconds since replication has executed its last event; None if it cannot be told.

        Needs ``PROCESS``: threads of the server are not shown without.
        """
        rows = self._rows(
            "SELECT TIME_MS milliseconds FROM information_schema.PROCESSLIST"
            " WHERE COMMAND = 'Slave_SQL' AND STATE LIKE 'Slave has read all relay log%%'"
        )
        return min((float(row["milliseconds"]) / 1000 for row in rows), default=None)

    # ##### What it is told #####

    def fence(self, patience: float) -> None:
        """Refuse the writes of all accounts but privileged ones, from now on.

        A transaction that is open is refused at its ``COMMIT``. When this returns, no commit is
        under way any more.

        :param patience: seconds to wait for statements that keep it off; others queue up
            behind it meanwhile.
        :raises django.db.OperationalError: it took longer, and nothing has changed.
        """
        self._rows("SET SESSION lock_wait_timeout = %s", max(1, int(patience)))
        self._rows("SET GLOBAL read_only = ON")

    def unfence(self) -> None:
        self._rows("SET GLOBAL read_only = OFF")

    def wait_for(self, position: str, seconds: float) -> bool:
        """Whether replication has executed ``position``; waits for it."""
        return bool(self._value("SELECT MASTER_GTID_WAIT(%s, %s)", position, seconds) == 0)

    def stop(self, link: str) -> None:
        """Stop a replication. One that stands is left alone."""
        self._rows(f"STOP SLAVE {self._connection_name(link)}")

    def start(self, link: str) -> None:
        """Start a replication. One that runs is left alone."""
        self._rows(f"START SLAVE {self._connection_name(link)}")

    def _connection_name(self, link: str) -> str:
        # A literal in the grammar: no parameter, and no name of a schema either.
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
    """Whether it is an error of the connection: nobody has answered, or not to the end.

    A server that refuses an account has answered, and so has one with which TLS fails.
    """
    return _code(exc) in _NO_ANSWER


def is_kept_off(exc: Error) -> bool:
    """Whether a statement gave up waiting for others."""
    return _code(exc) == _LOCK_WAIT


def why_no_session(node: str, account: str, exc: Error) -> str:
    """What is wrong when ``account`` gets no session on ``node``, for people.

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
    """Domain → server and sequence number of its last event, of a position as text."""
    parts = (part.strip().split("-") for part in text.split(",") if part.strip())
    return {int(domain): (int(server), int(number)) for domain, server, number in parts}


def missing(wanted: str, have: str) -> str:
    """What of the position ``wanted`` lies behind ``have``; empty text when nothing does."""
    there = positions(have)
    return ",".join(
        f"{domain}-{server}-{number}"
        for domain, (server, number) in sorted(positions(wanted).items())
        if there.get(domain, (0, 0))[1] < number
    )
