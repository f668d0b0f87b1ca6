"""The work on one server while a schema moves to another node of PostgreSQL.

On each server, the tables of the schema can be hidden under other names, created, and given their
real names again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.postgresql import schema_objects, snapshot
from sharded_orm.backends.postgresql.lock_waits import PostgreSQLLockWaits, is_lock_wait
from sharded_orm.backends.postgresql.move_locks import tables_lock
from sharded_orm.backends.postgresql.stock_session import begin_session
from sharded_orm.backends.schema_move import NAMES, SchemaDefinition, SchemaMove, hidden_name
from sharded_orm.backends.snapshot import OWN_PREFIX, SchemaSnapshot

# Seconds between two attempts to lock the tables.
_BETWEEN: Final = 0.002
# Seconds to wait for another session that changes the tables of the schema.
_PATIENCE: Final = 30.0
# Seconds to wait until the server has ended an automatic vacuum of a table. The server does so after
# deadlock_timeout, usually one second.
_VACUUM_PATIENCE: Final = 5.0
#: A table of what new tables lack until they are shown (renamed to their real names). It lists
#: their foreign keys, and the tables whose automatic vacuum is switched off.
_ADDITIONS: Final = f"{OWN_PREFIX}additions"


class PostgreSQLSchemaMove(SchemaMove):
    """Moves a schema on PostgreSQL. All tables are created, hidden or shown in one transaction, because
    schema changes are transactional on PostgreSQL.

    A hidden table has another name. Sequences are hidden in the same way. New tables get their
    foreign keys when the tables are shown.
    """

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection, confirm)
        self._schema = begin_session(connection)
        self._locks = PostgreSQLLockWaits(self._rows)

    # ##### Definitions of the schema #####

    def _table_names(self) -> list[str]:
        return schema_objects.relations(self._rows, self._schema, "rp")

    def _primary_key(self, table: str) -> tuple[str, ...]:
        return schema_objects.primary_key(self._rows, self._quote(table))

    def _obstacles(self) -> Iterator[str]:
        yield from schema_objects.obstacles(self._rows, self._schema, self._snapshot())

    def _snapshot(self) -> SchemaSnapshot:
        with self._connection.cursor() as cursor:
            return snapshot.read(cursor, self._schema)

    def definition(self) -> SchemaDefinition:
        with self._as_shown():
            statements = {
                name: (definition,) for name, definition in self._snapshot().definitions.items()
            }
            for name, statement in schema_objects.additions(self._rows, self._schema):
                statements[name] = (*statements.get(name, ()), statement)
        return SchemaDefinition(statements)

    def layout(self) -> Mapping[str, tuple[str, ...]]:
        return dict(self.definition().statements)

    @contextmanager
    def _as_shown(self) -> Iterator[None]:
        """Run a ``with`` block in which this session, and no other one, sees the tables under their
        real names.
        """
        if not self._hidden_relations():
            yield
            return
        self._refuse_names_in_use(self.hidden())
        self._rows("BEGIN")
        try:
            self._rows(f"SET LOCAL lock_timeout = '{_PATIENCE:.0f}s'")
            self._show(validate=True)
            yield
        finally:
            self._rows("ROLLBACK")

    def identities(self) -> frozenset[str]:
        hidden = set(self.hidden().values())
        # Identify a table by its id and the number of its file. TRUNCATE gives the table another file,
        # and so does an ALTER TABLE that rewrites the rows.
        rows = self._rows(
            "SELECT relname, oid::text || ':' || pg_catalog.pg_relation_filenode(oid)"
            " FROM pg_catalog.pg_class WHERE relkind = 'r' AND relnamespace ="
            " (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)",
            self._schema,
        )
        return frozenset(
            str(identity)
            for name, identity in rows
            if name in hidden or not str(name).startswith(OWN_PREFIX)
        )

    # ##### Hiding #####

    def build(self, definition: SchemaDefinition, tag: str) -> None:
        first = {name: statements[0] for name, statements in definition.statements.items()}
        with self._exclusively(_PATIENCE), self._locks.transaction(_PATIENCE):
            self._discard()
            schema_objects.become_owner(self._rows, self._schema, self._connection.alias)
            schema_objects.empty(self._rows, self._schema)
            with self._connection.cursor() as cursor:
                snapshot.build(cursor, SchemaSnapshot(first))
            for statements in definition.statements.values():
                for statement in statements[1:]:
                    self._rows(statement)
            self._put_additions_off()
            self._hide(self._visible_relations(), tag)

    def hide(self, tables: Sequence[CapturedTable], tag: str, patience: float) -> float:
        with self._exclusively(patience):
            hidden = self.hidden()
            names = [table.name for table in tables if table.name not in hidden]
            with self._locks.transaction(max(patience, _VACUUM_PATIENCE)):
                began = self._lock(names, patience)
                # If another session uses a sequence, renaming the sequence must fail and not wait.
                # The timeout is in milliseconds.
                self._rows("SET LOCAL lock_timeout = 1")
                sequences = [name for name, kind in self._visible_relations() if kind == "S"]
                self._hide([*((n, "r") for n in names), *((n, "S") for n in sequences)], tag)
            return began

    def _lock(self, names: Sequence[str], patience: float) -> float:
        """Lock tables in this transaction so that no other session can use them.

        Other sessions never wait for this method. If a table is in use, the attempt fails at once,
        and is repeated later. An automatic vacuum does not stop for such attempts. So this method
        first waits for a weaker lock, which makes the vacuum end.

        :param patience: seconds for which attempts are repeated.
        :return: when the successful attempt began, as ``time.monotonic()``.
        """
        if not names:
            return time.monotonic()
        lock = f"LOCK TABLE {', '.join(map(self._quote, names))} IN"
        # Take a lock that makes an automatic vacuum end. It blocks neither readers nor writers.
        self._rows(f"{lock} SHARE UPDATE EXCLUSIVE MODE")
        self._rows("SAVEPOINT attempt")
        deadline = time.monotonic() + patience
        while True:
            began = time.monotonic()
            try:
                self._rows(f"{lock} ACCESS EXCLUSIVE MODE NOWAIT")
                return began
            except OperationalError as exc:
                if began > deadline or not is_lock_wait(exc):
                    raise
            # Release the locks that this attempt has taken.
            self._rows("ROLLBACK TO SAVEPOINT attempt")
            # Wait for a fixed time, because the server does not signal when a lock becomes free.
            time.sleep(_BETWEEN)

    def _hide(self, relations: Iterable[tuple[str, str]], tag: str) -> None:
        table = self._quote(NAMES)
        self._rows(
            f"CREATE TABLE IF NOT EXISTS {table} (name text PRIMARY KEY, hidden text NOT NULL,"
            " kind text NOT NULL)"
        )
        renames = []
        for name, kind in relations:
            hidden = hidden_name(name, tag)
            self._rows(
                f"INSERT INTO {table} VALUES (%s, %s, %s) ON CONFLICT (name)"
                " DO UPDATE SET hidden = excluded.hidden, kind = excluded.kind",
                name,
                hidden,
                kind,
            )
            renames.append(self._rename(name, hidden, kind))
        if renames:
            self._rows(";\n".join(renames))

    def _rename(self, name: str, other: str, kind: str) -> str:
        what = "SEQUENCE" if kind == "S" else "TABLE"
        return f"ALTER {what} {self._quote(name)} RENAME TO {self._quote(other)}"

    def show(self, patience: float) -> None:
        with self._exclusively(patience):
            if NAMES not in self._table_names():
                # There is nothing to show: the tables have their real names and their foreign keys
                # already.
                return
            self._refuse_names_in_use(self.hidden())
            with self._locks.transaction(patience):
                self._show()

    def _show(self, *, validate: bool = False) -> None:
        """Rename all hidden tables and sequences back to their real names, in this transaction.

        :param validate: whether the foreign keys are checked against the existing rows.
        """
        statements = [
            self._rename(hidden, name, kind) for name, hidden, kind in self._hidden_relations()
        ]
        for table, key, definition in self._put_off():
            alter = f"ALTER TABLE {self._quote(table)}"
            if not key:
                statements.append(f"{alter} RESET (autovacuum_enabled)")
                continue
            is_checked = validate or definition.endswith(" NOT VALID")
            statements.append(
                f"{alter} ADD CONSTRAINT {self._quote(key)} {definition}"
                f"{'' if is_checked else ' NOT VALID'}"
            )
        statements.append(f"DROP TABLE {self._quote(NAMES)}")
        self._rows(";\n".join(statements))

    def discard(self) -> None:
        with self._exclusively(_PATIENCE), self._locks.transaction(_PATIENCE):
            self._discard()
            if not schema_objects.relations(self._rows, self._schema, "rpvmfS"):
                schema_objects.require_no_users(self._rows, self._schema)
                self._rows(f"DROP SCHEMA {self._quote(self._schema)} CASCADE")

    def _discard(self) -> None:
        present = set(self._table_names())
        tables = [*self.hidden().values(), *self._side_tables()]
        tables += [name for name in (NAMES, _ADDITIONS) if name in present]
        sequences = [hidden for _, hidden, kind in self._hidden_relations() if kind == "S"]
        if tables:
            self._rows(f"DROP TABLE {', '.join(map(self._quote, tables))}")
        # Use IF EXISTS, because most sequences belong to tables and were dropped together with these.
        for name in sequences:
            self._rows(f"DROP SEQUENCE IF EXISTS {self._quote(name)}")

    @contextmanager
    def _exclusively(self, patience: float) -> Iterator[None]:
        with tables_lock(self._rows, self._schema, patience):
            self._confirm()
            yield

    def _visible_relations(self) -> list[tuple[str, str]]:
        """Return the tables and sequences that are not hidden under other names.

        :returns: pairs of the name and the kind, a letter of ``pg_class.relkind``.
        """
        return [
            (name, kind)
            for kind in ("r", "S")
            for name in schema_objects.relations(self._rows, self._schema, kind)
            if not name.startswith(OWN_PREFIX)
        ]

    def _hidden_relations(self) -> list[tuple[str, str, str]]:
        """Return real name, hidden name and kind of each table and sequence that is hidden under
        another name.

        The kind is a letter of ``pg_class.relkind``.
        """
        present = set(schema_objects.relations(self._rows, self._schema, "rS"))
        if NAMES not in present:
            return []
        rows = self._rows(f"SELECT name, hidden, kind FROM {self._quote(NAMES)} ORDER BY name")
        return [(str(n), str(hidden), str(kind)) for n, hidden, kind in rows if hidden in present]

    # ##### Foreign keys and vacuum of new tables #####

    def _put_additions_off(self) -> None:
        """Postpone foreign keys and automatic vacuum of new tables until the tables are shown
        (renamed to their real names).

        Without foreign keys, rows can be copied in any order. A table records the keys, so that
        they can be added later. Vacuum could hold a lock on a table when the table is to be shown.
        """
        table = self._quote(_ADDITIONS)
        self._rows(
            f"CREATE TABLE {table} (tbl text NOT NULL, name text NOT NULL,"
            " definition text NOT NULL, PRIMARY KEY (tbl, name))"
        )
        keys = schema_objects.foreign_keys(self._rows, self._schema)
        plain = schema_objects.with_default_vacuum(self._rows, self._schema)
        for row in (*keys, *((name, "", "") for name in plain)):
            self._rows(f"INSERT INTO {table} VALUES (%s, %s, %s)", *row)
        statements = [
            f"ALTER TABLE {self._quote(name)} DROP CONSTRAINT {self._quote(key)}"
            for name, key, _ in keys
        ]
        statements += [
            f"ALTER TABLE {self._quote(name)} SET (autovacuum_enabled = off)" for name in plain
        ]
        if statements:
            self._rows(";\n".join(statements))

    def _put_off(self) -> list[tuple[str, str, str]]:
        if _ADDITIONS not in self._table_names():
            return []
        rows = self._rows(f"SELECT tbl, name, definition FROM {self._quote(_ADDITIONS)}")
        return [(str(table), str(name), str(definition)) for table, name, definition in rows]

    def warm_up(self) -> None:
        # Create statistics. Without them, the server would plan the first queries as if the tables were
        # empty.
        if hidden := self.hidden():
            self._rows(f"ANALYZE {', '.join(map(self._quote, hidden.values()))}")

    def finish(self) -> None:
        with self._exclusively(_PATIENCE):
            if self.hidden():
                return
            for table, key, definition in self._put_off():
                if key and not definition.endswith(" NOT VALID"):
                    # Check the foreign key for the existing rows. Other sessions can read and write
                    # meanwhile.
                    self._rows(
                        f"ALTER TABLE {self._quote(table)} VALIDATE CONSTRAINT {self._quote(key)}"
                    )
            self._rows(f"DROP TABLE IF EXISTS {self._quote(_ADDITIONS)}")

    # ##### Counters #####

    def counters(self) -> dict[str, int]:
        names = {hidden: name for name, hidden, _ in self._hidden_relations()}
        return {
            names.get(name, name): self._next_number(name)
            for name in schema_objects.relations(self._rows, self._schema, "S")
            if name in names or not name.startswith(OWN_PREFIX)
        }

    def _next_number(self, sequence: str) -> int:
        ((number,),) = self._rows(
            "SELECT q.last_value::numeric + CASE WHEN q.is_called THEN s.seqincrement ELSE 0 END"
            f" FROM {self._quote(sequence)} q, pg_catalog.pg_sequence s"
            " WHERE s.seqrelid = %s::pg_catalog.regclass",
            self._quote(sequence),
        )
        return int(number)

    def set_counters(self, counters: Mapping[str, int]) -> None:
        with self._exclusively(_PATIENCE):
            for name, hidden, kind in self._hidden_relations():
                if kind == "S" and name in counters:
                    # A sequence whose numbers are used up has no next number: set it to its last
                    # number, as used.
                    self._rows(
                        "SELECT pg_catalog.setval(seqrelid,"
                        " greatest(seqmin, least(seqmax, %s))::bigint, %s NOT BETWEEN seqmin AND seqmax) FROM pg_catalog.pg_sequence"
                        " WHERE seqrelid = %s::pg_catalog.regclass",
                        counters[name],
                        counters[name],
                        self._quote(hidden),
                    )
