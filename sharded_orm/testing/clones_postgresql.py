"""Creates test shards on PostgreSQL: each test shard is a schema in the database of its node.

The template is a schema that is migrated. Its definitions are read once. If a test shard is in the
same database as the template, the server copies the template's rows. Otherwise, this process copies
the rows with COPY.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from django.db.backends.base.base import NO_DB_ALIAS
from django.db.utils import load_backend

from sharded_orm import database_settings
from sharded_orm.backends.postgresql import snapshot
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.models.after_migrate.postgresql_defaults import functions_of
from sharded_orm.testing.clones import ServerCloner
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard

# Seconds to wait for a lock that a transaction of a test may hold. Without this limit, PostgreSQL
# would wait for ever.
_LOCK_TIMEOUT = 50
# PostgreSQL's limit for the length of a name, in bytes.
_MAX_IDENTIFIER = 63

# This query returns one row for each table: its name, whether it is partitioned, whether it has
# triggers other than PostgreSQL's own, its columns, and the expressions that read the columns.
# Generated columns are left out. Partitions are left out, because their rows are copied with the
# partitioned table. Values of a type that is defined in the schema are read as text, because each
# schema has its own version of the type.
_TABLES = """
SELECT c.relname, c.relkind = 'p',
  EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal),
  string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum),
  string_agg(
    CASE WHEN c.relnamespace IN (t.typnamespace, e.typnamespace)
      THEN format('%I::text::%s', a.attname, format_type(a.atttypid, a.atttypmod))
      ELSE quote_ident(a.attname) END,
    ', ' ORDER BY a.attnum)
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  AND a.attgenerated = ''
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_type e ON e.oid = t.typelem
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p')
  AND NOT c.relispartition
GROUP BY c.oid, c.relname, c.relkind ORDER BY c.relname"""
# This query returns pairs (referring table, referred table) for foreign keys that are not
# deferrable. PostgreSQL checks them at once, so rows must be copied to the referred table first.
_REFERENCES = """
SELECT c.relname, r.relname FROM pg_constraint k
JOIN pg_class c ON c.oid = k.conrelid JOIN pg_class r ON r.oid = k.confrelid
WHERE k.contype = 'f' AND NOT k.condeferrable AND k.conparentid = 0 AND k.conrelid <> k.confrelid
  AND k.connamespace = current_schema()::regnamespace
  AND r.relnamespace = k.connamespace"""
# This query returns the kind and the name of objects of the schema that are not tables: sequences
# (S), populated materialized views (m) and functions (f).
_OTHERS = """
SELECT relkind, relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace
  AND (relkind = 'S' OR (relkind = 'm' AND relispopulated))
UNION ALL SELECT 'f', proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
ORDER BY 2"""


@dataclass(frozen=True)
class _ClonedTable:
    """A table of the template (the migrated schema) whose rows are copied to test shards.

    :param has_triggers: whether the project has defined triggers on the table. PostgreSQL's own
        triggers, which check foreign keys, do not count.
    :param columns: SQL for the names of the columns.
    :param expressions: SQL that reads the columns from the template's table. If the type of a
        column is defined in the schema, the SQL converts its values to text and then to the type
        of that name in the test shard's schema.
    """

    name: str
    is_partitioned: bool
    has_triggers: bool
    columns: str
    expressions: str

    @cached_property
    def target(self) -> str:
        return _quoted(self.name)

    @property
    def own_rows(self) -> str:
        """SQL that names the table's rows without those of tables that inherit from it: ``ONLY t``.

        For a partitioned table, the SQL has no ``ONLY``, because its rows are in its partitions.
        """
        return self.target if self.is_partitioned else f"ONLY {self.target}"


@dataclass
class _ClonedSchema:
    """The template schema: its definitions, and what is needed to copy its rows to test shards.

    :param tables: the tables. Each table comes after the tables to which it refers.
    :param filled: the tables that have rows, in the same order.
    :param sequences: maps the name of each sequence to a pair: its last value, and whether this
        value was given out.
    :param views: names of the materialized views that are populated.
    """

    shard: Shard
    definitions: SchemaSnapshot
    tables: Sequence[_ClonedTable] = ()
    filled: Sequence[_ClonedTable] = ()
    sequences: dict[str, tuple[int, bool]] = field(default_factory=dict)
    views: Sequence[str] = ()
    functions: Sequence[str] = ()
    #: Maps the name of each filled table to its rows, in the text format of COPY. Empty until the
    #: rows are needed.
    rows: dict[str, list[bytes]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {table.name for table in self.tables}


class PostgreSQLCloner(ServerCloner):
    """Creates each test shard as a schema in the database of the shard's node.

    The template, the migrated schema from which the shards are cloned, may be on any node.
    """

    _template: _ClonedSchema

    def create_template(self, template: Shard, *, keep: bool) -> None:
        schema = _quoted(_checked(template))
        with self._cursor(template) as cursor:
            if not keep:
                cursor.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
            cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")

    def load_template(self, template: Shard) -> None:
        with self._cursor(template) as cursor:
            _enter(cursor, template.schema)
            loaded = _ClonedSchema(template, snapshot.read(cursor, template.schema))
            loaded.tables = _tables(cursor)
            loaded.filled = _filled(cursor, loaded.tables)
            cursor.execute(_OTHERS)
            others = cursor.fetchall()
            loaded.views = [name for kind, name in others if kind == "m"]
            loaded.functions = [name for kind, name in others if kind == "f"]
            for kind, name in others:
                if kind == "S":
                    cursor.execute(f"SELECT last_value, is_called FROM {_quoted(name)}")
                    loaded.sequences[name] = cursor.fetchone()
        self._template = loaded

    def clone(self, shard: Shard, *, keep: bool) -> None:
        schema = _quoted(_checked(shard))
        with self._cursor(shard) as cursor:
            if keep and self._has_same_definitions(cursor, shard):
                self._restore(cursor, shard)
            else:
                cursor.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")
                self._fill(cursor, shard)
            self._begin_counters(cursor, shard, self._template.names)

    def _fill(self, cursor: Any, shard: Shard) -> None:
        """Copy everything in the template schema to the schema of ``shard``, which is still empty."""
        template = self._template
        _enter(cursor, shard.schema)
        snapshot.build(cursor, template.definitions)
        self._replace_rows(cursor, shard, filled=())
        statements = [
            *self._sequence_values(),
            # Create the functions that generate ids. They are not copied from the template, because
            # each function contains the number of its shard.
            *functions_of(shard, template.functions),
            *(f"REFRESH MATERIALIZED VIEW {_quoted(view)}" for view in template.views),
        ]
        if statements:
            cursor.execute("; ".join(statements))

    def _has_same_definitions(self, cursor: Any, shard: Shard) -> bool:
        if shard.schema not in snapshot.names(cursor):
            return False
        _enter(cursor, shard.schema)
        return snapshot.read(cursor, shard.schema).looks_like(self._template.definitions)

    def restore(self, shard: Shard) -> None:
        with self._cursor(shard) as cursor:
            self._restore(cursor, shard)

    def _restore(self, cursor: Any, shard: Shard) -> None:
        _enter(cursor, shard.schema)
        self._replace_rows(cursor, shard, filled=_filled(cursor, self._template.tables))

    def _replace_rows(self, cursor: Any, shard: Shard, filled: Sequence[_ClonedTable]) -> None:
        """Replace the rows of the shard by those of the template (the migrated schema).

        All statements run in one transaction.

        :param cursor: a cursor in the shard's schema.
        :param filled: the tables of the shard that have rows now. Their rows are deleted first.
        """
        template = self._template
        if not template.filled and not filled:
            return
        triggered = sorted({t.target for t in (*filled, *template.filled) if t.has_triggers})
        before = [
            # Switch off the project's triggers, so that none refuses, changes or records a copied
            # row.
            *(f"ALTER TABLE {table} DISABLE TRIGGER USER" for table in triggered),
            "SET CONSTRAINTS ALL DEFERRED",
            *(f"DELETE FROM {table.own_rows}" for table in reversed(filled)),
        ]
        after = [
            # Run the deferred constraint checks now, because a table with pending checks cannot be
            # altered.
            "SET CONSTRAINTS ALL IMMEDIATE",
            *(f"ALTER TABLE {table} ENABLE TRIGGER USER" for table in triggered),
        ]
        if shard.node == template.shard.node:
            schema = _quoted(template.shard.schema)
            copied = [
                f"INSERT INTO {table.target} ({table.columns}) OVERRIDING SYSTEM VALUE"
                f" SELECT {table.expressions} FROM"
                f" {'' if table.is_partitioned else 'ONLY '}{schema}.{table.target}"
                for table in template.filled
            ]
            # Send all statements as one text: PostgreSQL runs the statements of one query text in
            # one transaction.
            cursor.execute("; ".join([*before, *copied, *after]))
            return
        self._load_rows()
        cursor.execute("; ".join(["BEGIN", *before]))
        for table in template.filled:
            with cursor.copy(f"COPY {table.target} ({table.columns}) FROM STDIN") as copy:
                for row in template.rows[table.name]:
                    copy.write(row)
        cursor.execute("; ".join([*after, "COMMIT"]))

    def _load_rows(self) -> None:
        """Read the rows of the template into memory, because SQL cannot copy them to another
        database.
        """
        template = self._template
        if len(template.rows) == len(template.filled):
            return
        with self._cursor(template.shard) as cursor:
            _enter(cursor, template.shard.schema)
            for table in template.filled:
                rows = f"SELECT {table.columns} FROM {table.own_rows}"
                with cursor.copy(f"COPY ({rows}) TO STDOUT") as copy:
                    template.rows[table.name] = [bytes(row) for row in copy]

    def reset_sequences(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            with self._cursor(shard) as cursor:
                _enter(cursor, shard.schema)
                for statement in self._sequence_values():
                    cursor.execute(statement)
                self._begin_counters(cursor, shard, self._template.names)

    def _sequence_values(self) -> Iterator[str]:
        """Yield the statement that sets the current schema's sequences to the template's values.

        Yield nothing if there are no sequences.
        """
        values = [
            f"setval({_literal(_quoted(name))}::regclass, {last}, {called})"
            for name, (last, called) in self._template.sequences.items()
        ]
        if values:
            yield f"SELECT {', '.join(values)}"

    def _drop(self, cursor: Any, schemas: Collection[str]) -> None:
        for schema in snapshot.names(cursor).intersection(schemas):
            # Drop each schema in a transaction of its own. One transaction for all schemas would
            # hold the locks of all dropped tables until its end.
            cursor.execute(f"DROP SCHEMA {_quoted(schema)} CASCADE")

    def _open(self, shard: Shard) -> Any:
        settings = complete(database_settings.shard_settings(shard))
        settings["SCHEMA"] = None
        wrapper: Any = load_backend(settings["ENGINE"]).DatabaseWrapper(settings, NO_DB_ALIAS)
        cursor: Any = wrapper._stock_wrapper({}).cursor()
        cursor.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}s'")
        return cursor


def _checked(shard: Shard) -> str:
    """Return the name of the shard's schema.

    :raises InvalidConfiguration: the name is too long for PostgreSQL.
    """
    # PostgreSQL would truncate a name that is too long, without an error, so that two shards might
    # get the same schema.
    if len(shard.schema.encode()) > _MAX_IDENTIFIER:
        raise InvalidConfiguration(
            [
                f"the test schema {shard.schema!r} of group {shard.group!r} has a name of more than"
                f" {_MAX_IDENTIFIER} bytes, which PostgreSQL does not allow. Shorten the group's"
                " DATABASE_NAME."
            ]
        )
    return shard.schema


def _enter(cursor: Any, schema: str) -> None:
    cursor.execute(f"SET search_path TO {_quoted(schema)}")


def _tables(cursor: Any) -> list[_ClonedTable]:
    """Return the tables of the current schema, each after the tables to which it refers.

    Deferrable foreign keys, such as those of Django, do not affect the order, because they are
    checked after the rows of all tables are copied.
    """
    cursor.execute(_TABLES)
    tables = {row[0]: _ClonedTable(*row) for row in cursor.fetchall()}
    before: dict[str, list[str]] = {name: [] for name in tables}
    cursor.execute(_REFERENCES)
    for name, referred in cursor.fetchall():
        if name in before:
            before[name].append(referred)
    try:
        order = TopologicalSorter(before).static_order()
        return [tables[name] for name in order if name in tables]
    except CycleError:
        # The tables refer to each other in a circle, by foreign keys that are checked at once, so
        # there is no correct order. Return any order: such tables are probably empty, because it is
        # hardly possible to insert rows into them.
        return list(tables.values())


def _filled(cursor: Any, tables: Sequence[_ClonedTable]) -> list[_ClonedTable]:
    """Return those of ``tables`` that have rows in the current schema, in the same order."""
    if not tables:
        return []
    tests = (f"EXISTS (SELECT FROM {table.own_rows})" for table in tables)
    cursor.execute(f"SELECT ARRAY[{', '.join(tests)}]")
    return [
        table for table, is_filled in zip(tables, cursor.fetchone()[0], strict=True) if is_filled
    ]


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def _literal(text: str) -> str:
    return "'{}'".format(text.replace("'", "''"))
