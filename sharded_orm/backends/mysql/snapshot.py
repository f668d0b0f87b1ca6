"""Read the definitions of a schema (its tables, views, triggers, …), and create a schema from them.

Reading sends two packets: the first lists the objects, and the second reads their definitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from MySQLdb import MySQLError

from sharded_orm.backends.mysql.session import NodeSession
from sharded_orm.backends.snapshot import (
    MARKER_APP,
    MARKER_PREFIX,
    OWN_PREFIX,
    SchemaSnapshot,
    format_digest,
    kind_of,
)
from sharded_orm.exceptions import RehearsalFailed

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool
    from sharded_orm.backends.mysql.node_cursor import NodeCursor

#: The largest number of schemas that one query reads.
BATCH = 500
_RECORDS = "django_migrations"
# Error codes for a schema or table that does not exist, or that the account is not allowed to see.
_NOT_THERE = frozenset((1044, 1049, 1142, 1146))

# Parts of definitions that are removed, because they differ between copies of the same schema.
# _AUTO_INCREMENT matches the counter of a table. _DEFINER matches the account that created a view,
# trigger or routine.
_AUTO_INCREMENT = re.compile(r"(?<=\n\) )(.*?)AUTO_INCREMENT=(\d+) ?")
_DEFINER = re.compile(r"(?<=CREATE )(.*?)DEFINER=`(?:[^`]|``)*`(?:@`(?:[^`]|``)*`)? ")
_CONDITION = re.compile(r"^ IF NOT EXISTS\b", re.IGNORECASE)
_FOREIGN_KEY = re.compile(r"\n  CONSTRAINT `((?:[^`]|``)*)` FOREIGN KEY \(([^)]*)\)")
_CREATE = re.compile(r"CREATE (?:OR REPLACE )?")

_TABLES = "SHOW FULL TABLES"
_LIST = (
    # Read the character set and collation of the schema from information_schema, not from variables
    # of the session. If another session has dropped the schema and created it again, the variables
    # still have the old values.
    "SELECT default_character_set_name, default_collation_name FROM information_schema.schemata"
    " WHERE schema_name = DATABASE()",
    _TABLES,
    # Filter by event_object_schema, not by trigger_schema. Both have the same value, but for a
    # filter by trigger_schema MariaDB looks into every schema of the server.
    "SELECT 'TRIGGER', trigger_name FROM information_schema.triggers"
    " WHERE event_object_schema = DATABASE() UNION ALL"
    " SELECT routine_type, routine_name FROM information_schema.routines"
    " WHERE routine_schema = DATABASE()",
)
# In the result of SHOW CREATE TRIGGER (or FUNCTION, PROCEDURE), the index of the column with the
# statement. It is 1 for all other kinds of objects.
_STATEMENT_COLUMN = {"TRIGGER": 2, "FUNCTION": 2, "PROCEDURE": 2}
# Kinds of objects that SHOW TABLES does not list: triggers, functions and procedures.
_NOT_LISTED = frozenset(kind.lower() for kind in _STATEMENT_COLUMN)
# The order in which kinds of objects are created. A table may use a sequence for a default, a view
# may use tables and functions, and a trigger belongs to a table.
_ORDER = ("function", "procedure", "sequence", "table", "view", "trigger")


def read(session: NodeSession, schema: str) -> SchemaSnapshot:
    """Return the definitions of all objects of ``schema``. Sends two packets, or one if the schema
    is empty.
    """
    defaults, tables, others = session.rows_in(schema, *_LIST)
    character_set, collation = (_text(value) for value in defaults[0])
    kinds = [(_text(kind), _text(name)) for kind, name in others]
    kinds += [(_table_kind(_text(kind)), _text(name)) for name, kind in tables]
    kinds = [(kind, name) for kind, name in kinds if not name.startswith(OWN_PREFIX)]
    definitions: dict[str, str] = {}
    counters: dict[str, int] = {}
    if kinds:
        results = session.rows_in(schema, *(_show_create(kind, name) for kind, name in kinds))
        for (kind, name), rows in zip(kinds, results, strict=True):
            definition = _text(rows[0][_STATEMENT_COLUMN.get(kind, 1)])
            if kind == "TABLE":
                definition = _without_counter(name, definition, counters)
            elif kind != "SEQUENCE":
                definition = _DEFINER.sub(r"\1", definition, count=1)
            own_names = kind in _STATEMENT_COLUMN
            if own_names:
                # Remove IF NOT EXISTS. MariaDB keeps it in the definition of a trigger, function or
                # procedure that was created with it.
                head, keyword, tail = definition.partition(kind)
                definition = head + keyword + _CONDITION.sub("", tail, count=1)
            definitions[f"{kind.lower()} {name}" if own_names else name] = definition
    return SchemaSnapshot(definitions, f"{character_set} {collation}", counters)


def glance(
    session: NodeSession, schema: str, known: SchemaSnapshot, tables: Sequence[str]
) -> SchemaSnapshot:
    """Return a snapshot of ``schema`` with little work: read only the definitions of ``tables``,
    and take those of all other objects from ``known``.

    Sends one packet, which also lists the tables and views. If one of them is neither in ``tables``
    nor in ``known``, its definition is "". Tables and views that were dropped are left out.

    :param known: definitions of the schema that were read earlier.
    """
    listed, *results = session.rows_in(
        schema, _TABLES, *(_show_create("TABLE", name) for name in tables)
    )
    counters = {name: number for name, number in known.counters.items() if name not in tables}
    definitions = {
        name: text for name, text in known.definitions.items() if kind_of(text) in _NOT_LISTED
    }
    for raw_name, raw_kind in listed:
        name, kind = _text(raw_name), _table_kind(_text(raw_kind)).lower()
        if name.startswith(OWN_PREFIX):
            continue
        text = known.definitions.get(name, "")
        definitions[name] = text if kind_of(text) == kind else ""
    for name, rows in zip(tables, results, strict=True):
        definitions[name] = _without_counter(name, _text(rows[0][1]), counters)
    return SchemaSnapshot(definitions, known.defaults, counters)


def _show_create(kind: str, name: str) -> str:
    return f"SHOW CREATE {kind} {_quoted(name)}"


def _without_counter(name: str, definition: str, counters: dict[str, int]) -> str:
    if match := _AUTO_INCREMENT.search(definition):
        counters[name] = int(match[2])
    return _AUTO_INCREMENT.sub(r"\1", definition, count=1)


def build(session: NodeSession, schema: str, snapshot: SchemaSnapshot) -> None:
    """Create in ``schema`` the tables, views, triggers, … that ``snapshot`` defines.

    Existing views of the same names are replaced; other existing objects stay as they are. Costs
    three round trips.
    """
    statements = [_repeatable(definition) for definition in _in_order(snapshot)]
    if not statements:
        return
    ((checks,),) = session.rows_in(schema, "SELECT @@foreign_key_checks")[0]
    try:
        # Switch foreign key checks off, because a foreign key may lead to a table that a later
        # statement creates.
        session.rows_in(schema, "SET foreign_key_checks = 0", *statements)
    finally:
        session.run(b"SET foreign_key_checks = %d" % int(checks))


def create_schema(pool: NodePool, schema: str, defaults: str) -> None:
    """Create an empty schema. If a schema of this name exists, and has no rows, it is dropped
    first. Sends three packets.

    :param defaults: the names of the character set and the collation, separated by a space; the
        ``defaults`` of a snapshot.
    :raises RehearsalFailed: a schema of this name exists and has rows.
    """
    character_set, collation = defaults.split()
    if _has_rows(pool, schema):
        raise RehearsalFailed(
            f"Schema {schema!r} has rows. That is the name of the copy on which migrations are"
            " rehearsed, which never has any: rename that schema, or the group's DATABASE_NAME."
        )
    _run(
        pool,
        f"DROP DATABASE IF EXISTS {_quoted(schema)}",
        f"CREATE DATABASE {_quoted(schema)} CHARACTER SET {character_set} COLLATE {collation}",
    )


def _has_rows(pool: NodePool, schema: str) -> bool:
    session = pool.lease_new()
    try:
        query = "SELECT table_name FROM tables WHERE table_type = 'BASE TABLE' AND table_schema = "
        (tables,) = session.rows_in("information_schema", query + _literal(schema))
        tests = (f"EXISTS (SELECT 1 FROM {_quoted(schema)}.{_quoted(_text(t))})" for (t,) in tables)
        ((has_rows,),) = session.rows_in(
            "information_schema", "SELECT " + (" OR ".join(tests) or "0")
        )[0]
        return bool(int(has_rows))
    finally:
        pool.discard(session)


def _literal(text: str) -> str:
    return "0x" + text.encode().hex()


def drop_schema(pool: NodePool, schema: str) -> None:
    _run(pool, f"DROP DATABASE IF EXISTS {_quoted(schema)}")


def _run(pool: NodePool, *statements: str) -> None:
    # Use a new session, and close it afterwards, so that it does not return to the pool. If its
    # current schema is dropped, the session has no schema any more.
    session = pool.lease_new()
    try:
        session.run(*(statement.encode() for statement in statements))
    finally:
        pool.discard(session)


def digests(cursor: NodeCursor, schemas: Sequence[str]) -> dict[str, str | None]:
    """Return a dict that maps each schema to a digest of its applied migrations.

    The digest is "" if the schema has no table ``django_migrations``, and None if the schema does
    not exist. One query reads 500 schemas. If it fails because a schema or a table is missing, two
    more queries find out which exist, and the digests of these are read again.
    """
    try:
        # Query the digests at once, without finding out first which schemas exist. Usually all of
        # them exist, and the list of existing schemas is long.
        return dict(_digests(cursor, schemas))
    except MySQLError as exc:
        if exc.args[0] not in _NOT_THERE:
            raise
    present = names(cursor)
    # With a constant for ``table_name``, the server answers this query without opening any table.
    cursor.execute(
        "SELECT table_schema FROM information_schema.tables WHERE table_name = %s", [_RECORDS]
    )
    recorded = {name for (name,) in cursor.fetchall()}
    with_records = [schema for schema in schemas if schema in present and schema in recorded]
    return {
        **{schema: None if schema not in present else "" for schema in schemas},
        **dict(_digests(cursor, with_records)),
    }


def names(cursor: NodeCursor) -> set[str]:
    """Return the names of all schemas of the node that the account can see."""
    cursor.execute("SHOW DATABASES")
    return {name for (name,) in cursor.fetchall()}


def _digests(cursor: NodeCursor, schemas: Sequence[str]) -> Iterator[tuple[str, str]]:
    # Compute the same digest as applied_digest() in sharded_orm.backends.snapshot does. A digest of
    # GROUP_CONCAT() would be simpler, but the server limits its length.
    row = "MD5(CONCAT(CONVERT(app USING utf8mb4), '/', CONVERT(name USING utf8mb4)))"
    digest = f"BIT_XOR(CAST(CONV(LEFT({row}, 16), 16, 10) AS UNSIGNED))"
    marker = f"app = '{MARKER_APP}' AND name LIKE '{MARKER_PREFIX}%%'"
    for first in range(0, len(schemas), BATCH):
        batch = schemas[first : first + BATCH]
        selects = (
            f"SELECT {position}, COUNT(*), {digest}"
            f" FROM {_quoted(schema).replace('%', '%%')}.{_RECORDS} WHERE NOT ({marker})"
            for position, schema in enumerate(batch)
        )
        cursor.execute(" UNION ALL ".join(selects), [])
        for position, count, bits in cursor.fetchall():
            yield batch[position], format_digest(count, int(bits))


def _in_order(snapshot: SchemaSnapshot) -> Iterable[str]:
    by_kind: dict[str, dict[str, str]] = {}
    for name, definition in snapshot.definitions.items():
        by_kind.setdefault(kind_of(definition), {})[name] = definition
    for kind in _ORDER:
        definitions = by_kind.pop(kind, {})
        if kind == "view":
            yield from _by_dependency(definitions)
        else:
            yield from definitions.values()
    assert not by_kind, f"definitions of an unknown kind: {sorted(by_kind)}"


def _by_dependency(views: dict[str, str]) -> Iterable[str]:
    dependencies = {
        name: [other for other in views if other != name and _quoted(other) in definition]
        for name, definition in views.items()
    }
    try:
        return [views[name] for name in TopologicalSorter(dependencies).static_order()]
    except CycleError:
        # The views seem to depend on each other in a cycle, so keep the order of the snapshot. It
        # often works: a view counts as dependent on another if its definition contains the name of
        # the other, even if this is only the name of a column. So there may be no cycle at all. If
        # the order does not work, the server raises an error.
        return list(views.values())


def _repeatable(definition: str) -> str:
    kind = kind_of(definition)
    if kind == "table":
        definition = _without_generated_keys(definition)
    if kind == "view":
        # MySQL has no CREATE VIEW IF NOT EXISTS, so replace an existing view.
        return _CREATE.sub("CREATE OR REPLACE ", definition, count=1)
    return re.sub(rf"\b{kind}\b", rf"{kind.upper()} IF NOT EXISTS", definition, count=1,
                  flags=re.IGNORECASE)  # fmt: skip


def _without_generated_keys(definition: str) -> str:
    """Return the definition of a table without the indexes that the server creates by itself for
    foreign keys.

    SHOW CREATE TABLE shows such indexes like those that somebody has created explicitly. But the
    server drops an index that it has created by itself as soon as another index can replace it. It
    never drops an explicit index. So if a copy of the table had explicit indexes in their place, a
    later migration could give the copy other indexes than the original.
    """
    for name, columns in _FOREIGN_KEY.findall(definition):
        definition = definition.replace(f"  KEY `{name}` ({columns}),\n", "", 1)
    return definition


def _table_kind(kind: str) -> str:
    return kind if kind in ("VIEW", "SEQUENCE") else "TABLE"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))
