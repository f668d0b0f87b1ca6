"""Reading and building schemas: a packet for the list, a packet for all definitions."""

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
    SchemaSnapshot,
    format_digest,
    kind_of,
)
from sharded_orm.exceptions import RehearsalFailed

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool
    from sharded_orm.backends.mysql.node_cursor import NodeCursor

#: Schemas that one statement asks.
BATCH = 500
_RECORDS = "django_migrations"
# Error codes: no such schema or table, or none that the account may see.
_NOT_THERE = frozenset((1044, 1049, 1142, 1146))

# The next number is no part of a table's definition; nor is who made a view or a trigger.
_AUTO_INCREMENT = re.compile(r"(?<=\n\) )(.*?)AUTO_INCREMENT=(\d+) ?")
_DEFINER = re.compile(r"(?<=CREATE )(.*?)DEFINER=`(?:[^`]|``)*`(?:@`(?:[^`]|``)*`)? ")
_CONDITION = re.compile(r"^ IF NOT EXISTS\b", re.IGNORECASE)
_FOREIGN_KEY = re.compile(r"\n  CONSTRAINT `((?:[^`]|``)*)` FOREIGN KEY \(([^)]*)\)")
_CREATE = re.compile(r"CREATE (?:OR REPLACE )?")

_TABLES = "SHOW FULL TABLES"
_LIST = (
    # The variables of the session may be those of a schema that had the same name.
    "SELECT default_character_set_name, default_collation_name FROM information_schema.schemata"
    " WHERE schema_name = DATABASE()",
    _TABLES,
    # A trigger is in the schema of its table; by trigger_schema, MariaDB would look into every schema
    # of the server.
    "SELECT 'TRIGGER', trigger_name FROM information_schema.triggers"
    " WHERE event_object_schema = DATABASE() UNION ALL"
    " SELECT routine_type, routine_name FROM information_schema.routines"
    " WHERE routine_schema = DATABASE()",
)
# Which column of SHOW CREATE … holds the statement.
_STATEMENT_COLUMN = {"TRIGGER": 2, "FUNCTION": 2, "PROCEDURE": 2}
# What is not among the tables.
_NAMELESS = frozenset(kind.lower() for kind in _STATEMENT_COLUMN)
# Tables refer to functions, views to both.
_ORDER = ("function", "procedure", "sequence", "table", "view", "trigger")


def read(session: NodeSession, schema: str) -> SchemaSnapshot:
    """The definitions of ``schema``. Two packets; the second only if anything is there."""
    defaults, tables, others = session.rows_in(schema, *_LIST)
    character_set, collation = (_text(value) for value in defaults[0])
    kinds = [(_text(kind), _text(name)) for kind, name in others]
    kinds += [(_table_kind(_text(kind)), _text(name)) for name, kind in tables]
    found: dict[str, str] = {}
    counters: dict[str, int] = {}
    if kinds:
        results = session.rows_in(schema, *(_show_create(*one) for one in kinds))
        for (kind, name), rows in zip(kinds, results, strict=True):
            definition = _text(rows[0][_STATEMENT_COLUMN.get(kind, 1)])
            if kind == "TABLE":
                definition = _without_counter(name, definition, counters)
            elif kind != "SEQUENCE":
                definition = _DEFINER.sub(r"\1", definition, count=1)
            own_names = kind in _STATEMENT_COLUMN
            if own_names:
                # MariaDB keeps what was written.
                head, keyword, rest = definition.partition(kind)
                definition = head + keyword + _CONDITION.sub("", rest, count=1)
            found[f"{kind.lower()} {name}" if own_names else name] = definition
    return SchemaSnapshot(found, f"{character_set} {collation}", counters)


def glance(
    session: NodeSession, schema: str, known: SchemaSnapshot, tables: Sequence[str]
) -> SchemaSnapshot:
    """``known`` with the ``tables`` as they are now, and whatever else there is or is no more."""
    listed, *results = session.rows_in(
        schema, _TABLES, *(_show_create("TABLE", name) for name in tables)
    )
    counters = {name: number for name, number in known.counters.items() if name not in tables}
    found = {name: text for name, text in known.definitions.items() if kind_of(text) in _NAMELESS}
    for told, what in listed:
        name, kind = _text(told), _table_kind(_text(what)).lower()
        text = known.definitions.get(name, "")
        found[name] = text if kind_of(text) == kind else ""
    for name, rows in zip(tables, results, strict=True):
        found[name] = _without_counter(name, _text(rows[0][1]), counters)
    return SchemaSnapshot(found, known.defaults, counters)


def _show_create(kind: str, name: str) -> str:
    return f"SHOW CREATE {kind} {_quoted(name)}"


def _without_counter(name: str, definition: str, counters: dict[str, int]) -> str:
    if told := _AUTO_INCREMENT.search(definition):
        counters[name] = int(told[2])
    return _AUTO_INCREMENT.sub(r"\1", definition, count=1)


def build(session: NodeSession, schema: str, snapshot: SchemaSnapshot) -> None:
    """Make what is missing of ``snapshot``; one packet."""
    statements = [_repeatable(definition) for definition in _in_order(snapshot)]
    if not statements:
        return
    ((checks,),) = session.rows_in(schema, "SELECT @@foreign_key_checks")[0]
    try:
        # Tables refer to each other in any order.
        session.rows_in(schema, "SET foreign_key_checks = 0", *statements)
    finally:
        session.run(b"SET foreign_key_checks = %d" % int(checks))


def create_schema(pool: NodePool, schema: str, defaults: str) -> None:
    """An empty schema, in place of one without rows that had its name. Two packets, or three.

    :param defaults: of a snapshot.
    :raises RehearsalFailed: what has the name has rows, so it is somebody's.
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
        told = "SELECT table_name FROM tables WHERE table_type = 'BASE TABLE' AND table_schema = "
        (tables,) = session.rows_in("information_schema", told + _literal(schema))
        looks = (f"EXISTS (SELECT 1 FROM {_quoted(schema)}.{_quoted(_text(t))})" for (t,) in tables)
        ((found,),) = session.rows_in(
            "information_schema", "SELECT " + (" OR ".join(looks) or "0")
        )[0]
        return bool(int(found))
    finally:
        pool.discard(session)


def _literal(text: str) -> str:
    return "0x" + text.encode().hex()


def drop_schema(pool: NodePool, schema: str) -> None:
    _run(pool, f"DROP DATABASE IF EXISTS {_quoted(schema)}")


def _run(pool: NodePool, *statements: str) -> None:
    # A session that is in the schema would have none afterwards.
    session = pool.lease_new()
    try:
        session.run(*(statement.encode() for statement in statements))
    finally:
        pool.discard(session)


def digests(cursor: NodeCursor, schemas: Sequence[str]) -> dict[str, str | None]:
    """Schema -> digest of its ``django_migrations``; see ``applied_digests``.

    Costs a query per 500; two more for the node, and the first again, if a schema or table is
    missing.
    """
    try:
        # As a rule all are there; to look for them costs as much as all schemas of the node.
        return dict(_digests(cursor, schemas))
    except MySQLError as exc:
        if exc.args[0] not in _NOT_THERE:
            raise
    present = names(cursor)
    # A constant name is looked up in each schema; no table is opened.
    cursor.execute(
        "SELECT table_schema FROM information_schema.tables WHERE table_name = %s", [_RECORDS]
    )
    recorded = {name for (name,) in cursor.fetchall()}
    asked = [schema for schema in schemas if schema in present and schema in recorded]
    return {
        **{schema: None if schema not in present else "" for schema in schemas},
        **dict(_digests(cursor, asked)),
    }


def names(cursor: NodeCursor) -> set[str]:
    """All schemas of the node that the account may see."""
    cursor.execute("SHOW DATABASES")
    return {name for (name,) in cursor.fetchall()}


def _digests(cursor: NodeCursor, schemas: Sequence[str]) -> Iterator[tuple[str, str]]:
    # As snapshot.applied_digest() does. The statement must not have a limit, as the length of
    # GROUP_CONCAT is one.
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
        for position, count, found in cursor.fetchall():
            yield batch[position], format_digest(count, int(found))


def _in_order(snapshot: SchemaSnapshot) -> Iterable[str]:
    by_kind: dict[str, dict[str, str]] = {}
    for name, definition in snapshot.definitions.items():
        by_kind.setdefault(kind_of(definition), {})[name] = definition
    for kind in _ORDER:
        definitions = by_kind.pop(kind, {})
        if kind == "view":
            yield from _after_what_they_read(definitions)
        else:
            yield from definitions.values()
    assert not by_kind, f"definitions of an unknown kind: {sorted(by_kind)}"


def _after_what_they_read(views: dict[str, str]) -> Iterable[str]:
    read = {
        name: [other for other in views if other != name and _quoted(other) in definition]
        for name, definition in views.items()
    }
    try:
        return [views[name] for name in TopologicalSorter(read).static_order()]
    except CycleError:  # A column has the name of a view, say: the server will tell.
        return list(views.values())


def _repeatable(definition: str) -> str:
    kind = kind_of(definition)
    if kind == "table":
        definition = _without_generated_keys(definition)
    if kind == "view":
        # MySQL has no CREATE VIEW IF NOT EXISTS.
        return _CREATE.sub("CREATE OR REPLACE ", definition, count=1)
    return re.sub(rf"\b{kind}\b", rf"{kind.upper()} IF NOT EXISTS", definition, count=1,
                  flags=re.IGNORECASE)  # fmt: skip


def _without_generated_keys(definition: str) -> str:
    """Let the server make the index of a foreign key itself.

    One that it made goes when another index takes its place; one that was asked for stays, and
    the definition tells both alike. So the tables would part at a later migration.
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
