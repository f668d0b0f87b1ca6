"""Move a schema to another node: the steps that run on a single PostgreSQL server.

On the new node, they create the tables of the schema. They also hide tables, which means that they
rename them, so that other processes do not find them. Later, they give hidden tables their usual
names again.
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
# Seconds to wait for another session that creates, hides or renames tables of the schema.
_PATIENCE: Final = 30.0
# Seconds to wait until the server has stopped an automatic vacuum of a table. The server does so
# after deadlock_timeout, usually one second.
_VACUUM_PATIENCE: Final = 5.0
#: The name of a table in the schema. New tables have no foreign keys and no automatic vacuum until
#: they get their usual names. This table lists what must be added to them then.
_ADDITIONS: Final = f"{OWN_PREFIX}additions"


class PostgreSQLSchemaMove(SchemaMove):
    """Moves a schema on PostgreSQL.

    Tables and sequences of the schema are hidden from other processes under other names. PostgreSQL
    can roll back schema changes, so all of them are created, hidden or shown in one transaction.
    New tables get their foreign keys only when they are shown.
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
        """Run a ``with`` block in which this session sees the hidden tables under their usual
        names. Other sessions do not: the transaction is rolled back at the end.
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
        # A table's identity is its id with the number of its file. TRUNCATE, or an ALTER TABLE that
        # rewrites the rows, gives the table another file, so the identity shows that, too.
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
                # Rename the sequences without waiting (lock_timeout is one millisecond). If another
                # session uses one of them, this fails.
                self._rows("SET LOCAL lock_timeout = 1")
                sequences = [name for name, kind in self._visible_relations() if kind == "S"]
                self._hide([*((n, "r") for n in names), *((n, "S") for n in sequences)], tag)
            return began

    def _lock(self, names: Sequence[str], patience: float) -> float:
        """Lock tables in this transaction, so that no other session can use them.

        No other session has to wait for this. If a table is in use, the attempt fails at once, and
        is repeated later. Such an attempt does not make an automatic vacuum stop. So this method
        first waits for a weaker lock, which does.

        :param patience: seconds for which attempts are repeated.
        :return: when the successful attempt began, as ``time.monotonic()``.
        """
        if not names:
            return time.monotonic()
        lock = f"LOCK TABLE {', '.join(map(self._quote, names))} IN"
        # This lock makes an automatic vacuum of the tables stop. It blocks neither readers nor
        # writers.
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
                # The table of hidden names does not exist, so no table is hidden. An earlier call
                # has already given the tables their usual names and their foreign keys.
                return
            self._refuse_names_in_use(self.hidden())
            with self._locks.transaction(patience):
                self._show()

    def _show(self, *, validate: bool = False) -> None:
        """Give all hidden tables and sequences their usual names again, in this transaction. Also
        add the foreign keys that new tables lack.

        :param validate: whether to check the foreign keys for the existing rows.
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
        # Use IF EXISTS, because most sequences belong to a table, and were dropped with it.
        for name in sequences:
            self._rows(f"DROP SEQUENCE IF EXISTS {self._quote(name)}")

    @contextmanager
    def _exclusively(self, patience: float) -> Iterator[None]:
        with tables_lock(self._rows, self._schema, patience):
            self._confirm()
            yield

    def _visible_relations(self) -> list[tuple[str, str]]:
        """Return the tables and sequences of the schema that are not hidden.

        :returns: pairs (name, kind), where the kind is a letter of ``pg_class.relkind``: r or S.
        """
        return [
            (name, kind)
            for kind in ("r", "S")
            for name in schema_objects.relations(self._rows, self._schema, kind)
            if not name.startswith(OWN_PREFIX)
        ]

    def _hidden_relations(self) -> list[tuple[str, str, str]]:
        """Return the hidden tables and sequences as tuples (usual name, hidden name, kind).

        The kind is a letter of ``pg_class.relkind``: r or S.
        """
        present = set(schema_objects.relations(self._rows, self._schema, "rS"))
        if NAMES not in present:
            return []
        rows = self._rows(f"SELECT name, hidden, kind FROM {self._quote(NAMES)} ORDER BY name")
        return [(str(n), str(hidden), str(kind)) for n, hidden, kind in rows if hidden in present]

    # ##### Foreign keys and vacuum of new tables #####

    def _put_additions_off(self) -> None:
        """Take the foreign keys and the automatic vacuum away from new tables, until the tables are
        shown under their usual names.

        Without foreign keys, rows can be copied in any order. The keys are recorded in a table, to
        add them later. Without the automatic vacuum, no vacuum can hold a lock at the moment when
        the tables are to be shown.
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
        # Create statistics about the copied rows. Otherwise the server would plan the first queries
        # as if the tables were empty.
        if hidden := self.hidden():
            self._rows(f"ANALYZE {', '.join(map(self._quote, hidden.values()))}")

    def finish(self) -> None:
        with self._exclusively(_PATIENCE):
            if self.hidden():
                return
            for table, key, definition in self._put_off():
                if key and not definition.endswith(" NOT VALID"):
                    # The foreign key was added without a check of the existing rows. Check them
                    # now, while other sessions can read and write.
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
                    # If the sequence has no numbers left, its next number is out of range, and
                    # setval() would refuse it. Set the sequence to its last number then, and mark
                    # this number as used.
                    self._rows(
                        "SELECT pg_catalog.setval(seqrelid,"
                        " greatest(seqmin, least(seqmax, %s))::bigint, %s NOT BETWEEN seqmin AND seqmax) FROM pg_catalog.pg_sequence"
                        " WHERE seqrelid = %s::pg_catalog.regclass",
                        counters[name],
                        counters[name],
                        self._quote(hidden),
                    )
