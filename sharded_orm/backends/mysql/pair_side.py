"""One server of a pair: two MariaDB servers that replicate from each other.

The module checks the settings and the replication of the server. Replication in both directions is
safe only with the settings that :meth:`MySQLPairSide.server_problems` requires.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from django.db.backends.mysql.base import DatabaseWrapper

from sharded_orm.backends.mysql.gtids import positions
from sharded_orm.backends.mysql.pair_replication import MySQLPairReplication
from sharded_orm.backends.mysql.row_copy import PASSES
from sharded_orm.backends.mysql.side_fence_states import fence_states
from sharded_orm.backends.mysql.side_rows import MySQLSideRows
from sharded_orm.backends.mysql.table_alteration import alteration, demands
from sharded_orm.backends.schema import KEEP_DEFAULTS
from sharded_orm.backends.side_fence import EPOCH, FenceState
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.topology.aliases import complete

#: Privileges that the operator's account needs on the whole server. On the schemas of shards, it
#: needs those of SCHEMA_PRIVILEGES.
SERVER_PRIVILEGES: Final = (
    "BINLOG ADMIN", "BINLOG MONITOR", "BINLOG REPLAY", "READ_ONLY ADMIN", "RELOAD",
    "REPLICATION SLAVE ADMIN", "SLAVE MONITOR",
)  # fmt: skip
SCHEMA_PRIVILEGES: Final = (
    "SELECT", "INSERT", "UPDATE", "DELETE", "CREATE", "DROP", "ALTER", "INDEX", "REFERENCES",
    "TRIGGER", "EVENT",
)  # fmt: skip

# Session settings for a change that must not be replicated, because the library makes it on each
# of the two servers of a pair. For example, a migration inserts a row of django_migrations on each
# server. With these auto_increment settings, the row gets the same id on both.
_QUIET: Final = (
    f"sql_log_bin = 0, auto_increment_increment = 1, auto_increment_offset = 1, {PASSES} = 1"
)


@dataclass(frozen=True)
class _Variable:
    """A variable of the server: its name, the value that a pair needs, and what would go wrong with
    another value.

    :param restart: whether the server reads the variable only when it starts.
    """

    name: str
    value: str
    consequence: str
    restart: bool = False

    def remedy(self) -> str:
        setting = f"{self.name} = {self.value}" if self.value else f"an empty {self.name}"
        if self.restart:
            return f"set {setting} in its configuration, and restart it"
        text = f"'{self.value}'" if not self.value.isalnum() else self.value
        return f"SET GLOBAL {self.name} = {text}, and so in its configuration"


_VARIABLES: Final = (
    _Variable("log_bin", "ON", "the other side receives nothing", restart=True),
    _Variable(
        "log_slave_updates", "ON", "a server made from this one would miss rows", restart=True
    ),
    _Variable(
        "binlog_format", "ROW", "statements would run on both sides, and could give other values"
    ),
    _Variable("binlog_row_image", "FULL", "the other side could not tell which row is meant"),
    _Variable("gtid_strict_mode", "ON", "events could be logged out of their order"),
    _Variable("slave_run_triggers_for_rbr", "NO", "triggers would change replicated rows again"),
    _Variable("slave_type_conversions", "", "values could be changed to fit a column"),
    _Variable("slave_exec_mode", "STRICT", "differences of rows would not be noticed"),
    _Variable("slave_skip_errors", "OFF", "events that fail would be left out", restart=True),
)


class MySQLPairSide(MySQLPairReplication):
    """A connection to one server of a pair, with the operator's account. For one thread only.

    Methods named ``…_problems`` yield sentences for the operator, without a full stop.
    """

    # ##### Reasons against a pair #####

    def operator_problems(self, schemas: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for each privilege or group of privileges that the operator's account
        lacks to manage the pair.

        :param schemas: the schemas of the pair's shards.
        """
        granted = self._privileges()
        if "ALL PRIVILEGES" in granted:
            return
        lacking = [name for name in SERVER_PRIVILEGES if name not in granted]
        if lacking:
            yield (
                f"the OPERATOR account of node {self.name!r} lacks a privilege; there, run"
                f" GRANT {', '.join(lacking)} ON *.* TO that account"
            )
        grants = self._grant_lines()
        for schema in schemas:
            granted_here = granted | _schema_privileges(grants, schema)
            lacking = [name for name in SCHEMA_PRIVILEGES if name not in granted_here]
            if lacking and "ALL PRIVILEGES" not in granted_here:
                yield (
                    f"the OPERATOR account of node {self.name!r} lacks a privilege on the schema"
                    f" {schema!r}, and perhaps on others; there, run GRANT {', '.join(lacking)} ON"
                    f" `{schema}`.* TO that account"
                )
                return

    def server_problems(self) -> Iterator[str]:
        """Yield the reasons why this server's settings make replication in both directions unsafe."""
        status = self.status()
        if not status.can_be_promoted:
            yield f"{self.name!r} is no MariaDB ({status.version}): pairs need MariaDB's GTIDs"
            return
        values = {
            str(row["name"]).lower(): (str(row["value"]), str(row["origin"]))
            for row in self._rows(
                "SELECT VARIABLE_NAME name, GLOBAL_VALUE value, GLOBAL_VALUE_ORIGIN origin"
                " FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME IN ({})".format(
                    ", ".join(["%s"] * (len(_VARIABLES) + 1))
                ),
                *(variable.name.upper() for variable in _VARIABLES),
                "READ_ONLY",
            )
        }
        for variable in _VARIABLES:
            value, _ = values[variable.name]
            if value.upper() != variable.value:
                yield (
                    f"{self.name!r} has {variable.name} = {value!r}, so {variable.consequence}:"
                    f" {variable.remedy()}"
                )
        value, origin = values["read_only"]
        # After SET GLOBAL, the server no longer shows the value in its configuration file. So check
        # the value only if it comes from the file.
        if origin != "SQL" and value.upper() != "ON":
            yield (
                f"{self.name!r} would take writes after a restart, although the other side may have"
                " become active meanwhile: set read_only = ON in its configuration, and open the"
                " server by SET GLOBAL read_only = OFF"
            )
        for name, value in self._log_filters().items():
            yield (
                f"{self.name!r} does not log everything ({name} = {value!r}), so rows would be lost:"
                f" remove {name.lower().replace('_', '-')} from its configuration"
            )

    def identity_problems(self, other: Self) -> Iterator[str]:
        """Yield the reasons why this server and ``other`` cannot be the two servers of a pair."""
        mine, theirs = self.status(), other.status()
        if mine.identity == theirs.identity:
            yield (
                f"{self.name!r} and {other.name!r} are the same server: a pair needs two; correct HOST"
                " and PORT in NODES"
            )
            return
        if mine.server_id == theirs.server_id:
            yield (
                f"{self.name!r} and {other.name!r} have the same server_id ({mine.server_id}), so each"
                " would leave out the other's events: give one of them another, also in its"
                " configuration"
            )
        if mine.domain == theirs.domain:
            yield (
                f"{self.name!r} and {other.name!r} have the same gtid_domain_id ({mine.domain}), and"
                " both write: give one of them another (SET GLOBAL gtid_domain_id = …), also in its"
                " configuration"
            )

    def follow_problems(self, source: Self, *, keeps_for_later: bool = False) -> Iterator[str]:
        """Yield the reasons why this server may miss changes of ``source``, or does not execute
        them.

        :param keeps_for_later: True if this server is meant to receive changes now and to execute
            them later. Then it is no problem that it does not execute them yet.
        """
        number = source.status().server_id
        links = self.links()
        if not links:
            yield (
                f"{self.name!r} does not replicate from {source.name!r}: run 'manage.py pairs setup"
                f" {source.name} {self.name}'"
            )
        for link in links:
            address = f"{link.host}:{link.port}"
            why = f" ({link.error})" if link.error else ""
            if link.source_id == number:
                # The delay was set by hold(), so that this server keeps changes for later. It is no
                # problem here, so hide it from link_problems(), which would report it.
                yield from self.link_problems(replace(link, delay=0) if keeps_for_later else link)
                for runs, thread in (
                    (link.receives, "IO_THREAD"),
                    (link.executes or keeps_for_later, "SQL_THREAD"),
                ):
                    if not runs:
                        yield (
                            f"replication from {source.name!r} to {self.name!r} does not run{why}:"
                            f" repair the cause, then START SLAVE {thread} on {self.name!r}"
                        )
            elif link.is_connected:
                yield (
                    f"{self.name!r} replicates from {address}, which is not {source.name!r}, and a side"
                    f" of a pair has one source: STOP SLAVE {link.name!r}, RESET SLAVE {link.name!r} ALL"
                )
            else:
                yield (
                    f"{self.name!r} has not reached {address}, from which it replicates{why}: correct"
                    f" the cause, or STOP SLAVE {link.name!r}, RESET SLAVE {link.name!r} ALL, and run"
                    f" 'manage.py pairs setup {source.name} {self.name}'"
                )

    def follows(self, source: Self) -> bool:
        """Whether this server receives and executes what ``source`` writes."""
        link = self.link_from(source)
        return link is not None and link.receives and link.executes

    def foreign_objects(self, schemas: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each trigger or event in ``schemas`` that this library has not
        created. Two queries.

        A trigger or event of the project would change rows on the passive side, where all changes
        should come from the other server.

        :param schemas: the schemas of shards whose passive side is on this server.
        """
        if not schemas:
            return
        listed = ", ".join(["%s"] * len(schemas))
        for kind, column in (("trigger", "TRIGGER"), ("event", "EVENT")):
            rows = self._rows(
                f"SELECT {column}_SCHEMA place, {column}_NAME name"
                f" FROM information_schema.{column}S WHERE {column}_SCHEMA IN ({listed})",
                *schemas,
            )
            for row in rows:
                if not str(row["name"]).startswith(OWN_PREFIX):
                    yield (
                        f"{self.name!r} has the {kind} {row['name']!r} in {row['place']!r}, where it is"
                        f" the passive side: rows there may come from the other side only; SET"
                        f" sql_log_bin = 0, then DROP {kind.upper()} `{row['place']}`.`{row['name']}`"
                    )

    def epochs(self, schemas: Sequence[str]) -> dict[str, int]:
        """Return a dict that maps each schema to the number of its epoch, as this server has stored
        it. One query.

        A new epoch begins each time that the operator makes the passive side the active one because
        the former active side is dead. Schemas whose epoch is 0 are left out.
        """
        if not schemas:
            return {}
        rows = self._rows(
            "SELECT ROUTINE_SCHEMA place, ROUTINE_COMMENT epoch FROM information_schema.ROUTINES"
            " WHERE ROUTINE_NAME = %s AND ROUTINE_SCHEMA IN ({})".format(
                ", ".join(["%s"] * len(schemas))
            ),
            EPOCH,
            *schemas,
        )
        return {str(row["place"]): int(row["epoch"]) for row in rows}

    def fences(self, schemas: Sequence[str]) -> dict[str, FenceState]:
        """Return a dict that maps each schema to the state of its fence on this server. Few
        queries.
        """
        if not schemas:
            return {}
        return fence_states(self._rows, self._connection.ops.quote_name, schemas)

    def columns(self, schemas: Sequence[str]) -> dict[str, dict[str, list[tuple[Any, ...]]]]:
        """Return the columns of all tables: ``result[schema][table]`` is a list of tuples. One
        query.

        The columns are in the order of the table, because row-based replication matches columns by
        position. Each tuple is (name, type, character set, whether NULL is allowed, default). The
        library's own tables, such as those of key moves, are left out.
        """
        columns: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
        if not schemas:
            return columns
        rows = self._rows(
            "SELECT TABLE_SCHEMA place, TABLE_NAME name, COLUMN_NAME col, COLUMN_TYPE kind,"
            " CHARACTER_SET_NAME charset, IS_NULLABLE takes_null, COLUMN_DEFAULT fallback"
            " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA IN ({})"
            " ORDER BY TABLE_SCHEMA, TABLE_NAME, ORDINAL_POSITION".format(
                ", ".join(["%s"] * len(schemas))
            ),
            *schemas,
        )
        for row in rows:
            if str(row["name"]).startswith(OWN_PREFIX):
                continue
            names = ("col", "kind", "charset", "takes_null", "fallback")
            tables = columns.setdefault(str(row["place"]), {})
            tables.setdefault(str(row["name"]), []).append(tuple(row[name] for name in names))
        return columns

    def data_bytes(self, schemas: Sequence[str]) -> int:
        """Return the size of all tables of ``schemas`` in bytes, as the server estimates it. One
        query.
        """
        rows = self._rows(
            "SELECT SUM(DATA_LENGTH + INDEX_LENGTH) size FROM information_schema.TABLES"
            " WHERE TABLE_SCHEMA IN ({})".format(", ".join(["%s"] * len(schemas))),
            *schemas,
        )
        return int(rows[0]["size"] or 0)

    def knows_events_of(self, source: Self) -> bool:
        """Whether this server's replication position contains a GTID of the domain in which
        ``source`` writes. If it contains none, nobody can tell from the position which changes of
        ``source`` this server has.
        """
        return source.status().domain in positions(self.status().current)

    def application_problems(self, account: str) -> Iterator[str]:
        yield from super().application_problems(account)
        if "BINLOG ADMIN" in self._privileges():
            yield (
                f"{account} of node {self.name!r} may write without logging it (BINLOG ADMIN), so the"
                " other side would lack rows: REVOKE BINLOG ADMIN ON *.* from it"
            )

    # ##### Sessions #####

    @staticmethod
    def quiet_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings for sessions whose changes stay on this server and are not replicated to
        the other.

        Such a session writes nothing into the binary log, and fences do not refuse its writes. If
        a migration adds a column with a default, the default stays in the database. (Usually Django
        drops it after it has added the column.)

        :param settings: the settings of the node with the operator's account.
        """
        options = dict(settings.get("OPTIONS") or {})
        own = str(options.get("init_command") or "").rstrip("; ")
        options["init_command"] = f"{own}, {_QUIET}" if own else f"SET {_QUIET}"
        return {**settings, "OPTIONS": options, KEEP_DEFAULTS: True}

    def rows(self, settings: Mapping[str, Any]) -> MySQLSideRows:
        """Open a session that compares rows.

        :param settings: the settings of the node with the operator's account.
        """
        options = {**(settings.get("OPTIONS") or {}), "binary_prefix": True}
        own = {**complete(settings), "NAME": "", "TIME_ZONE": None, "OPTIONS": options}
        return MySQLSideRows(DatabaseWrapper(own, f"{self.name} (comparison)"))

    alteration = staticmethod(alteration)
    demands = staticmethod(demands)


# Matches a line of SHOW GRANTS about one or several schemas: ``pattern`` is a name with wildcards.
_SCHEMA_GRANT = re.compile(r"GRANT (?P<privileges>.+) ON `(?P<pattern>[^`]+)`\.\* TO ")


def _schema_privileges(grants: Iterable[str], schema: str) -> set[str]:
    """Return the privileges on ``schema`` that are granted by ``grants``, the lines of ``SHOW
    GRANTS``.
    """
    return {
        privilege
        for line in grants
        if (match := _SCHEMA_GRANT.match(line)) and _like(match["pattern"]).fullmatch(schema)
        for privilege in match["privileges"].split(", ")
    }


def _like(pattern: str) -> re.Pattern[str]:
    r"""Translate a pattern of ``LIKE``, such as ``photos\_%``, to a regular expression."""
    parts = re.findall(r"\\.|.", pattern)
    wildcards = {"%": ".*", "_": "."}
    return re.compile(
        "".join(wildcards.get(part) or re.escape(part[-1]) for part in parts), re.DOTALL
    )
