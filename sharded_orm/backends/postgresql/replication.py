"""Query and change PostgreSQL's streaming replication, for a promotion (a replica replaces its
primary).

The fence of a server makes it refuse all work of applications: the databases of the shards are
closed (``ALLOW_CONNECTIONS false``), and their sessions are ended. The server stores this in its
catalog. So the fence outlives a restart, and replication copies it to the replica.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

from django.db import Error, OperationalError
from django.db.backends.postgresql.base import DatabaseWrapper
from psycopg.conninfo import conninfo_to_dict

from sharded_orm.backends.postgresql import replication_queries as queries
from sharded_orm.backends.postgresql.branches import branches_named
from sharded_orm.backends.postgresql.server_probe import SilentServer, is_silent
from sharded_orm.backends.postgresql.sql_quotes import quoted
from sharded_orm.backends.replication import (
    FenceTexts,
    ReplicationLink,
    ReplicationServer,
    ReplicationStatus,
    Task,
)
from sharded_orm.backends.sqlstate import LOCK_NOT_AVAILABLE, QUERY_CANCELED, sqlstate_of
from sharded_orm.backends.two_phase.branch import BranchName
from sharded_orm.topology.aliases import complete

#: The database in which an operator's session works, because it stays open when the server is
#: fenced. The fence closes the shards' databases.
MAINTENANCE: Final = "postgres"

_CONNECT_TIMEOUT = 5  # seconds

# Seconds between two queries, while this process waits for sessions to end or for a replica.
_INTERVAL = 0.005
# Options in a node's settings that are meant for the application's sessions, not for an operator's.
_NOT_FOR_OPERATORS = ("pool", "server_side_binding", "isolation_level", "assume_role")


class FenceTimeout(OperationalError):
    """After a fence has closed the databases, their sessions did not end in time."""


class PostgreSQLReplicationServer(ReplicationServer):
    """A connection to one PostgreSQL server, to query and change its replication.

    :param databases: the databases that a fence of the server closes. If some are passed, the
        session works in the database :data:`MAINTENANCE`; otherwise in the node's own database.
    """

    product = "PostgreSQL"
    default_port = 5432
    is_promoted_for_good = True
    replica_takes_writes = False
    texts = FenceTexts(
        name="the promotion",
        is_fenced="is closed",
        fences="closes the databases of {node}",
        opens="promotes {node}, and opens its databases",
        not_fenced="could not be closed",
        stays_open="does not stay closed",
        fenced_before="was closed",
        opened="somebody has opened {node!r} again",
        stays_fenced="stays closed, or a replica",
        kept_off="sessions do not end there",
        intruder="a session is open there",
        to_see="pg_monitor",
        to_fence="ALTER DATABASE … ALLOW_CONNECTIONS false, and pg_terminate_backend() for its sessions",
        to_open="ALTER DATABASE … ALLOW_CONNECTIONS true",
        to_start="start its replication",
        to_end="pg_promote()",
        afterwards=(
            "{old} stays closed, also after a restart. To make it a replica of {new}, use pg_rewind or"
            " a new pg_basebackup."
        ),
    )

    def __init__(
        self, name: str, settings: Mapping[str, Any], databases: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._databases = list(databases)
        self._fence: dict[str, str] = {}
        own = {**complete(settings), "TIME_ZONE": None}
        if databases:
            # The fence will close the node's databases. So set no name: Django then connects to the
            # database "postgres", which stays open.
            own["NAME"] = None
        own["OPTIONS"] = {
            **{k: v for k, v in own["OPTIONS"].items() if k not in _NOT_FOR_OPERATORS},
            "connect_timeout": _CONNECT_TIMEOUT,
        }
        self._connection = DatabaseWrapper(own, f"{name} (operator)")
        try:
            self._connection.ensure_connection()
        except OperationalError as exc:
            if is_silent(own):
                raise SilentServer(*exc.args) from exc
            raise

    # ##### Queries about the state of the server #####

    def status(self) -> ReplicationStatus:
        (row,) = self._rows(queries.STATUS)
        position, closed = str(row["position"] or ""), self._is_fenced()
        return ReplicationStatus(
            str(row["version"]),
            str(row["identity"]),
            bool(row["replica"]) or closed,
            position,
            position,
            closed=closed,
        )

    def _is_fenced(self) -> bool:
        closed = [not row["open"] for row in self._rows(queries.DATABASES, self._databases)]
        return bool(closed) and all(closed)

    def _sessions(self) -> list[dict[str, Any]]:
        return self._rows(queries.SESSIONS, self._databases)

    def _beginning(self) -> set[tuple[int, str]]:
        """Return the sessions that are just being opened, as pairs (process id, transaction).

        A fence must wait for such a session. The session may have checked that its database is open
        before the fence closed the database, and can then still write. If it has not made this
        check yet, the server refuses it.
        """
        rows = self._rows(queries.BEGINNING, self._databases)
        return {(row["pid"], row["transaction"]) for row in rows}

    def _is_replica(self) -> bool:
        return bool(self._value("SELECT pg_catalog.pg_is_in_recovery()"))

    def _system(self) -> int:
        """Return the system identifier: a number that is the same on a server and on its replicas."""
        return int(self._value("SELECT system_identifier FROM pg_catalog.pg_control_system()"))

    def _timeline(self) -> int:
        # Read the timeline (a number that changes at a promotion) from the name of the present log
        # file. The control file may still have an old one, that of the last checkpoint.
        file = "pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn())"
        return int(self._value(f"SELECT pg_catalog.left({file}, 8)"), 16)

    def links(self) -> list[ReplicationLink]:
        return [_link(row) for row in self._receivers()]

    def _receivers(self) -> list[dict[str, Any]]:
        return self._rows(queries.LINK) if self._is_replica() else []

    def link_from(self, source: Self) -> ReplicationLink | None:
        if source._is_replica() or source._system() != self._system():
            return None
        timeline = source._timeline()
        for row in self._receivers():
            # A timeline of None means that the replica receives nothing at the moment. Return its
            # link nevertheless, because the link shows this.
            if row["timeline"] in (None, timeline):
                return _link(row)
        return None

    def replicates_from(self, source: Self) -> bool:
        return self._is_replica() and source._system() == self._system()

    def schemas(self) -> set[str]:
        rows = self._rows(
            "SELECT nspname AS name FROM pg_catalog.pg_namespace"
            " WHERE pg_catalog.has_schema_privilege(oid, 'USAGE')"
        )
        return {str(row["name"]) for row in rows}

    def idle_seconds(self) -> float | None:
        """Return the age in seconds of the last replayed transaction. Its time comes from the clock
        of the old primary.
        """
        for row in self._receivers():
            if row["age"] is not None:
                return max(float(row["age"]), 0.0)
        return None

    def prepared_branches(self) -> list[BranchName]:
        rows = self._rows(
            "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = ANY(%s)", self._databases
        )
        return branches_named(str(row["gid"]) for row in rows)

    # ##### Reasons against a promotion #####

    def privilege_problems(self, task: Task) -> Iterator[str]:
        pid = self._connection.connection.info.backend_pid
        if self._value("SELECT pg_catalog.pg_backend_pid()") != pid:
            yield (
                f"HOST and PORT of node {self.name!r} lead to a pooler: a promotion has to ask the server"
                " itself"
            )
        (row,) = self._rows(queries.PRIVILEGES)
        if row["super"]:
            return
        grants = [] if row["monitor"] else ["pg_monitor"]
        if task == "fence" and not row["signal"]:
            grants.append("pg_signal_backend")
        account = f"the OPERATOR account of node {self.name!r} lacks a privilege"
        if grants:
            yield f"{account}; there, run GRANT {', '.join(grants)} TO that account"
        if task == "promote" and not row["promote"]:
            yield (
                f"{account}; on the primary, in the database {MAINTENANCE!r}, run GRANT EXECUTE ON"
                " FUNCTION pg_promote(boolean, integer) TO that account"
            )
        foreign = [
            r["name"] for r in self._rows(queries.DATABASES, self._databases) if not r["owned"]
        ]
        for name in foreign:
            yield (
                f"{account}: it must own the database {name!r}, or be a member of the role that owns it"
            )

    def source_problems(self) -> Iterator[str]:
        if self._is_replica():
            yield f"{self.name!r} is a replica itself"
        present = {row["name"] for row in self._rows(queries.DATABASES, self._databases)}
        for name in self._databases:
            if name == MAINTENANCE:
                yield (
                    f"the shards of {self.name!r} are in the database {name!r}, from which the operator"
                    " works, so that it cannot be closed: rename the database"
                )
            elif name not in present:
                yield f"{self.name!r} has no database {name!r}"

    def replica_problems(self, source: Self, link: ReplicationLink) -> Iterator[str]:
        if (
            self._value("SELECT pg_catalog.current_setting('default_transaction_read_only')")
            == "on"
        ):
            yield (
                f"{self.name!r} would refuse writes also as the primary: set"
                " default_transaction_read_only = off in its configuration"
            )

    def link_problems(self, link: ReplicationLink) -> Iterator[str]:
        delay = self._value("SELECT pg_catalog.current_setting('recovery_min_apply_delay')")
        if delay != "0":
            yield (
                f"{self.name!r} replicates {delay} later on purpose (recovery_min_apply_delay): set it"
                " to 0"
            )

    def warnings(self, task: Task) -> Iterator[str]:
        if task == "fence":
            for row in self._rows(queries.OTHERS, [*self._databases, MAINTENANCE]):
                yield (
                    f"the database {row['name']!r} of {self.name!r} has no shards and is not closed:"
                    " what is written there from now on is on no other server"
                )
        elif self._value("SELECT pg_catalog.current_setting('synchronous_standby_names')"):
            yield (
                f"{self.name!r} has synchronous_standby_names: as the primary, it lets each commit wait"
                " until such a replica is connected"
            )

    def application_problems(self, account: str) -> Iterator[str]:
        if self._rows(queries.PRIVILEGES)[0]["super"]:
            yield (
                f"{account} of node {self.name!r} is a superuser: it could open a closed database"
                " again, and an OPERATOR that is none cannot end its sessions. Give the application an"
                " account with privileges on its schemas only"
            )
        unlogged = [str(row["name"]) for row in self._rows(queries.UNLOGGED)]
        if unlogged:
            more = " and others" if len(unlogged) > 3 else ""
            yield (
                f"the tables {', '.join(unlogged[:3])}{more} of node {self.name!r} are not replicated"
                " (UNLOGGED), and would be empty: ALTER TABLE … SET LOGGED"
            )

    # ##### Changes #####

    def fence(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        self._rows(f"SET lock_timeout = {max(1, int(patience * 1000))}")
        self._allow_connections(False)
        # Sessions that are just being opened may have seen the database still open, so wait for
        # them, too. The server refuses all sessions that begin later.
        beginning = self._beginning()
        while True:
            # Ask first for the sessions that are being opened, and then for the open ones. A
            # session that is no longer in the first answer is then in the second one, or has ended.
            beginning &= self._beginning()
            sessions = self._sessions()
            if not beginning and not sessions:
                break
            if time.monotonic() > deadline:
                accounts = sorted({str(row["account"]) for row in sessions})
                raise FenceTimeout(
                    f"{len(sessions)} sessions of {', '.join(accounts) or 'nobody'}, and"
                    f" {len(beginning)} that are beginning"
                )
            self._rows(queries.END_SESSIONS, self._databases)
            time.sleep(_INTERVAL)
        # Commit something once more. With synchronous_commit = off, commits of the ended sessions
        # may not be on disk yet. This commit writes them, so the position in the log that is read
        # next is behind all of them.
        self._allow_connections(False)
        self._fence = self._versions()

    def unfence(self) -> None:
        self._allow_connections(True)

    def _allow_connections(self, allowed: bool) -> None:
        # Do not wait for a synchronous replica at the next commits. A newly promoted server has no
        # replica yet. On the old primary, the caller itself waits for the replica.
        self._rows("SET synchronous_commit = local")
        # Statements in one packet are one transaction: either all databases are changed or none.
        self._rows(
            "; ".join(
                f"ALTER DATABASE {quoted(name)} ALLOW_CONNECTIONS {str(allowed).lower()}"
                for name in self._databases
            )
        )

    def _versions(self) -> dict[str, str]:
        """Return a dict that maps each closed database to the version of its row in the server's
        catalog. The version changes whenever somebody opens or closes the database.
        """
        return {
            row["name"]: row["version"]
            for row in self._rows(queries.DATABASES, self._databases)
            if not row["open"]
        }

    def written_since(self, position: str) -> str:
        # Compare the versions of the databases' rows, to see whether a database was opened. The
        # position in the log would not show that, because the log also grows when no client writes,
        # for example by checkpoints.
        if self._versions() != self._fence:
            return "its databases were opened"
        sessions = self._sessions()
        return f"{len(sessions)} sessions are open" if sessions else ""

    def copy_problems(self, source: Self) -> Iterator[str]:
        # The fence has changed the catalog's rows of the closed databases. Only a copy of the
        # source has the same versions of these rows. To compare the positions in the log would not
        # be enough, because a server that is no copy may have reached the same position.
        if self._versions() != source._fence:
            yield f"{self.name!r} is at the position of {source.name!r} and has not closed its databases"

    def wait_for(self, position: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while missing(position, self.status().current):
            if time.monotonic() > deadline:
                return False
            time.sleep(_INTERVAL)
        return True

    def wait_for_source(self, source: Self, seconds: float) -> bool:
        return self.wait_for(source.status().logged, seconds)

    def start(self, link: str) -> None:
        # A replica always replicates until it is promoted, so there is nothing to start.
        pass

    def stop(self, link: str) -> None:
        raise NotImplementedError("PostgreSQL stops to replicate by promote() only")

    def forget(self, link: str) -> None:
        raise NotImplementedError("PostgreSQL stops to replicate by promote() only")

    def promote(self, seconds: float) -> bool:
        if self._is_replica():
            # Let pg_promote() return at once. If it waited for the end of the promotion, it would
            # check only every 100 ms.
            self._rows("SELECT pg_catalog.pg_promote(false)")
        deadline = time.monotonic() + seconds
        while self._is_replica():
            if time.monotonic() > deadline:
                return False
            time.sleep(_INTERVAL)
        return True

    # ##### Positions and errors #####

    @staticmethod
    def missing(wanted: str, have: str) -> str:
        return missing(wanted, have)

    @staticmethod
    def has_no_answer(exc: Error) -> bool:
        return isinstance(exc, SilentServer)

    @staticmethod
    def is_kept_off(exc: Error) -> bool:
        state = sqlstate_of(exc)
        return isinstance(exc, FenceTimeout) or state in (LOCK_NOT_AVAILABLE, QUERY_CANCELED)

    @staticmethod
    def why_no_session(node: str, account: str, exc: Error) -> str:
        text = " ".join(str(exc).split())
        if isinstance(exc, SilentServer):
            return f"node {node!r} does not answer: {text}"
        return f"node {node!r} refuses {account}: {text}"


def _link(row: Mapping[str, Any]) -> ReplicationLink:
    address = _address(row)
    executed = str(row["executed"] or "")
    received = str(row["received"] or "")
    if not missing(received, executed):
        # After a restart, a replica first replays the log that it has stored, and receives nothing
        # yet. So what it has executed counts as received.
        received = executed
    is_behind = bool(missing(received, executed))
    receives = row["status"] == "streaming"
    error = "its replay is paused: SELECT pg_wal_replay_resume()" if row["paused"] else ""
    return ReplicationLink(
        name="",
        host=address[0],
        port=address[1],
        receives=receives,
        executes=not row["paused"],
        received=received,
        executed=executed,
        seconds_behind=int(row["age"] or 0) if is_behind else 0,
        error=error if receives else f"its WAL receiver is {row['status'] or 'not connected'}",
    )


def _address(row: Mapping[str, Any]) -> tuple[str, int]:
    """Return host and port of the server from which the replica receives its log. If it receives
    nothing now, return those in its settings.
    """
    if row["host"]:
        return str(row["host"]), int(row["port"])
    parts = conninfo_to_dict(row["conninfo"] or "")
    port = str(parts.get("port") or "")
    return str(parts.get("host") or "localhost"), int(port) if port.isdigit() else 5432


# ##### Positions #####


def missing(wanted: str, have: str) -> str:
    """Return ``wanted`` if this position in the server's log lies beyond ``have``; otherwise ""."""
    return wanted if _number(wanted) > _number(have) else ""


def _number(position: str) -> int:
    """Return a position such as ``16/B374D848`` as a number; 0 for ""."""
    high, _, low = position.partition("/")
    return (int(high, 16) << 32) + int(low, 16) if low else 0
