"""Change capture of a shard on PostgreSQL. During a long operation, such as the move of a shard
key, triggers record changed rows in a journal. While a *fence* (a row in a table) is closed, the
same triggers refuse writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from sharded_orm.backends.change_capture import (
    EVENTS,
    FENCES,
    JOURNAL,
    CapturedTable,
    ChangeCapture,
    trigger_name,
)
from sharded_orm.backends.move_locks import TABLES, of_copier, of_fence
from sharded_orm.backends.postgresql import open_sessions
from sharded_orm.backends.postgresql.capture_triggers import (
    EPOCH,
    TRUNCATE,
    trigger_statements,
    truncate_statements,
)
from sharded_orm.backends.postgresql.lock_waits import PostgreSQLLockWaits
from sharded_orm.backends.postgresql.move_locks import (
    advisory_key,
    creation,
    end_holders,
    tables_lock,
)
from sharded_orm.backends.postgresql.stock_session import begin_session
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveRefused

_TRIGGERS: Final = (
    "SELECT t.tgname, c.relname FROM pg_catalog.pg_trigger t"
    " JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid"
    " WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace"
    " WHERE nspname = pg_catalog.current_schema()) AND NOT t.tgisinternal"
)


class PostgreSQLChangeCapture(ChangeCapture):
    """Change capture of one shard on PostgreSQL.

    A fence is a row that says whether the triggers record changes or refuse them. For example,
    there is one for each key that moves, or for a whole shard that moves.

    Each fence has an advisory lock, its *gate*. A transaction that changes rows of the key or shard
    holds a shared lock on the gate until it ends. So a session that asks for an exclusive lock on
    the gate waits only for these writers, and later writers wait behind it. (With a lock on the
    fence's row, later writers would not wait behind it.)
    """

    # The query for the enabled triggers. It does not return a trigger that somebody has disabled,
    # so such a trigger counts as missing.
    _all_triggers = f"SELECT tgname FROM ({_TRIGGERS} AND t.tgenabled = 'A') enabled"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._schema = begin_session(connection)
        self._locks = PostgreSQLLockWaits(self._rows)

    def exclusively(self, patience: float) -> AbstractContextManager[None]:
        return tables_lock(self._rows, self._schema, patience)

    def end_sessions(self, number: int | None = None) -> int:
        purposes = [TABLES] if number is None else [TABLES, of_fence(number), of_copier(number)]
        return sum(end_holders(self._rows, self._schema, purpose) for purpose in purposes)

    def check_privileges(self, *, sessions: bool = True) -> None:
        ((user, may_create, sees_sessions, foreign),) = self._rows(
            "SELECT current_user, pg_catalog.has_schema_privilege(%s, 'CREATE')"
            " AND pg_catalog.has_language_privilege('plpgsql', 'USAGE'),"
            " pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'), ARRAY(SELECT relname::text"
            " FROM pg_catalog.pg_class WHERE relkind IN ('r', 'p') AND relnamespace ="
            " (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)"
            " AND NOT pg_catalog.pg_has_role(relowner, 'USAGE') ORDER BY relname)",
            self._schema,
            self._schema,
        )
        problems = []
        if not may_create:
            problems.append(
                f"the account {user!r} cannot create triggers on {self._connection.alias!r}: grant it"
                f" CREATE on the schema {self._schema!r}, and USAGE on the language plpgsql"
            )
        if foreign:
            problems.append(
                f"the account {user!r} cannot create triggers on {self._connection.alias!r}, because the"
                f" table {foreign[0]!r} belongs to another role: make the account a member of that role"
            )
        if sessions and not sees_sessions:
            problems.append(
                f"the account {user!r} cannot see which sessions are open on the server of"
                f" {self._connection.alias!r}: grant it pg_read_all_stats"
            )
        if problems:
            raise MoveRefused(problems)

    # ##### Fences #####

    def prepare(self) -> None:
        if not self._is_complete():
            with creation(self._rows, self._schema):
                super().prepare()

    def is_prepared(self) -> bool:
        return FENCES in self._relations()

    def _is_complete(self) -> bool:
        return {FENCES, JOURNAL, EPOCH} <= self._relations()

    def _relations(self) -> set[str]:
        rows = self._rows(
            "SELECT relname FROM pg_catalog.pg_class WHERE relnamespace ="
            " (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s) AND relname = ANY(%s)",
            self._schema,
            [FENCES, JOURNAL, EPOCH],
        )
        return {str(name) for (name,) in rows}

    def watch(self, number: int, value: Any, *, closed: bool = False) -> None:
        epoch = self._quote(EPOCH)
        with self._locks.transaction():
            super().watch(number, value, closed=closed)
            # A transaction that took its snapshot before this moment cannot see the new fence. But
            # it sees the present value of a sequence, because sequences do not depend on snapshots.
            # So store the id of this transaction in a sequence. When a trigger runs in an old
            # transaction, it finds that the stored id is not in its snapshot, and makes the
            # transaction fail.
            self._rows(
                f"SELECT pg_catalog.setval('{epoch}', greatest(last_value,"
                f" pg_catalog.pg_current_xact_id()::text::bigint)) FROM {epoch}"
            )

    def close(self, number: int, patience: float) -> None:
        with self._locks.transaction(patience):
            self._rows(
                f"SELECT pg_catalog.pg_advisory_xact_lock(gate) FROM {self._quote(FENCES)}"
                " WHERE id = %s",
                number,
            )
            self._close(number)

    def _table_statements(self) -> Iterator[str]:
        seed = advisory_key(self._schema, "gates")
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._quote(FENCES)} (id bigint PRIMARY KEY,"
            ' value text COLLATE "C" NOT NULL UNIQUE, state text NOT NULL, gate bigint NOT NULL'
            f" GENERATED ALWAYS AS (pg_catalog.hashtextextended(value, {seed})) STORED)"
        )
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._quote(JOURNAL)}"
            " (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, fence bigint NOT NULL,"
            " tbl text NOT NULL, pk text NOT NULL)"
        )
        index = self._quote(f"{JOURNAL}_fence")
        yield f"CREATE INDEX IF NOT EXISTS {index} ON {self._quote(JOURNAL)} (fence, id)"
        yield f"CREATE SEQUENCE IF NOT EXISTS {self._quote(EPOCH)} MINVALUE 0"

    def _stored_key(self, value: Any) -> str:
        return str(value)

    # ##### Sessions of others #####

    def sessions(self) -> dict[str, Any]:
        return open_sessions.marker(self._rows)

    def sessions_left(self, markers: Sequence[Any]) -> list[int]:
        return open_sessions.left(self._rows, markers)

    # ##### Triggers #####

    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        deadline = time.monotonic() + patience
        for table in tables:
            self._locks.attempt(deadline, partial(self._install, table))

    def _install(self, table: CapturedTable) -> None:
        # This lock waits for all transactions that have changed the table, and does not block
        # readers.
        self._rows(f"LOCK TABLE {self._quote(table.name)} IN SHARE ROW EXCLUSIVE MODE")
        present = self.triggers()
        for event in EVENTS:
            if trigger_name(table.name, event) not in present:
                kinds = self._types_of(table)
                for statement in trigger_statements(
                    table, event, self._schema, self._quote, self._key_of, kinds
                ):
                    self._rows(statement)
        if trigger_name(table.name, TRUNCATE) not in present:
            for statement in truncate_statements(table, self._schema, self._quote):
                self._rows(statement)

    def _types_of(self, table: CapturedTable) -> set[str]:
        rows = self._rows(
            "SELECT t.typname FROM pg_catalog.pg_attribute a"
            " JOIN pg_catalog.pg_type t ON t.oid = a.atttypid WHERE a.attrelid = %s::regclass"
            " AND a.attname = ANY(%s)",
            self._quote(table.name),
            list(table.pks),
        )
        return {str(name) for (name,) in rows}

    def _uninstall(self, deadline: float) -> None:
        drops: dict[str, list[str]] = {}
        for name, table in self._rows(_TRIGGERS):
            if str(name).startswith(OWN_PREFIX):
                drop = f"DROP TRIGGER IF EXISTS {self._quote(name)} ON {self._quote(table)}"
                drops.setdefault(str(table), []).append(drop)
        for statements in drops.values():
            self._locks.attempt(deadline, partial(self._run_all, statements))
        self._locks.attempt(deadline, self._drop_all)

    def _drop_all(self) -> None:
        for (name,) in self._rows(
            "SELECT p.proname FROM pg_catalog.pg_proc p WHERE p.pronamespace ="
            " (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)"
            " AND pg_catalog.starts_with(p.proname::text, %s)",
            self._schema,
            OWN_PREFIX,
        ):
            self._rows(f"DROP FUNCTION IF EXISTS {self._quote(name)}()")
        self._rows(f"DROP TABLE IF EXISTS {self._quote(JOURNAL)}, {self._quote(FENCES)}")
        self._rows(f"DROP SEQUENCE IF EXISTS {self._quote(EPOCH)}")

    def _run_all(self, statements: Sequence[str]) -> None:
        for statement in statements:
            self._rows(statement)
