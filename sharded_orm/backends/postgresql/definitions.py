"""Make the statements that define the objects of a schema, from rows of the server's catalogs.

As in MySQL's SHOW CREATE TABLE, each column and constraint of a table has a line of its own. What
``CREATE TABLE`` cannot express (comments, row security, …) follows as separate statements after a
semicolon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from sharded_orm.backends.postgresql.catalog import CatalogRow
from sharded_orm.backends.postgresql.sql_quotes import literal, quoted
from sharded_orm.backends.snapshot import SchemaSnapshot, kind_of

#: Stands for the name of the schema in the definition of a function that names its own schema. So
#: equal functions in two schemas have equal definitions.
SCHEMA = "$schema"
#: Separates the statements of one definition. The definition of a function is never split, because
#: its body may contain this text.
END = ";\n"
#: Appended to the definition of a function that names a table in its arguments or SQL body. Such a
#: function must be created after the tables.
USES_TABLES = "/* uses tables */"
#: Appended to the definition of an index that is not valid, because CREATE INDEX CONCURRENTLY has
#: failed.
INVALID = " /* not valid */"
#: Stands at the end of a sequence's definition, before the column to which the sequence belongs.
OWNED_BY = "\nOWNED BY "

# Matches a quoted name or a text literal. A literal with backslash escapes begins with E.
_QUOTED_TEXT = re.compile(
    r"""(?P<name>"(?:[^"]|"")*")|(?P<escaped>\bE'(?:[^']|'')*')|'(?:[^']|'')*'"""
)
# The name of the function that generates timestamped ids begins with _ID_FUNCTION. The pattern
# matches the number of the shard in its body.
_ID_FUNCTION = "sharded_orm_next_id_"
_SHARD_NUMBER = re.compile(r"(?<=\n  shard CONSTANT bigint := )\d+(?=;\n)")

# For rows of the catalog that are pieces of a table's definition. Maps the section of such a row to
# the attribute of _Table that collects these pieces.
_PIECES = {
    "table": "options",
    "column": "columns",
    "constraint": "constraints",
    "addition": "additions",
}
_TRIGGER_STATES = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}


@dataclass
class _Table:
    """The pieces of one table's definition. Each piece is a pair (text by which the pieces are
    sorted, SQL).
    """

    options: list[tuple[str, str]] = field(default_factory=list)
    columns: list[tuple[str, str]] = field(default_factory=list)
    constraints: list[tuple[str, str]] = field(default_factory=list)
    additions: list[tuple[str, str]] = field(default_factory=list)

    def definition(self, name: str) -> str:
        elements = [text for parts in (self.columns, self.constraints) for _, text in sorted(parts)]
        body = ",\n  ".join(elements)
        options = "".join(text for _, text in self.options)
        create = f"CREATE TABLE {quoted(name)} (\n  {body}\n){options}"
        return END.join((create, *(text for _, text in sorted(self.additions))))


def compose(rows: Iterable[CatalogRow]) -> SchemaSnapshot:
    """Return the snapshot of a schema, made from ``rows`` of the catalog about this schema.

    Schemas with equal objects have equal snapshots. So two things that differ between shards are
    replaced. The name of the schema in a function becomes a placeholder. The number of the shard in
    the function that generates timestamped ids becomes NULL.
    """
    tables: dict[str, _Table] = {}
    definitions: dict[str, str] = {}
    counters: dict[str, int] = {}
    shard_numbers: dict[str, int] = {}
    for section, name, text, detail in rows:
        if section in _PIECES:
            table = tables.setdefault(name, _Table())
            getattr(table, _PIECES[section]).append((detail or "", _in_lines(text)))
        elif section == "counter":
            counters[name] = int(text)
        else:
            key, definition = _object(section, name, text, detail or "")
            definitions[key] = definition
            if name.startswith(_ID_FUNCTION) and (match := _SHARD_NUMBER.search(text)):
                shard_numbers[name.partition("(")[0]] = int(match[0])
    definitions |= {name: table.definition(name) for name, table in tables.items()}
    return SchemaSnapshot(
        dict(sorted(definitions.items())), counters=counters, shard_numbers=shard_numbers
    )


def _object(section: str, name: str, text: str, detail: str) -> tuple[str, str]:
    """Return the key of an object in the schema's snapshot, and the object's definition."""
    if section in ("function", "statistics"):
        text = _without_schema(text, name, detail)
        return f"{kind_of(text)} {name}", text
    if section == "other":
        # This package cannot create an object of such a kind. So its definition is only its name.
        key = f"{name} {text.replace(f'{detail}.', '') if detail else text}"
        return key, key
    text = _in_lines(text)
    if section == "type":
        return f"{kind_of(text)} {name}", text
    if section == "index":
        return name, text + (INVALID if detail else "")
    if section == "sequence":
        return name, text + (OWNED_BY + detail if detail else "")
    if section == "view":
        return name, text
    if section == "trigger":
        detail, state = detail[:-1], detail[-1]
        if state in _TRIGGER_STATES:
            text += (
                f"{END}ALTER TABLE {quoted(detail)} {_TRIGGER_STATES[state]} TRIGGER {quoted(name)}"
            )
    return f"{section} {detail}.{name}", text.removesuffix(";")


def _in_lines(text: str) -> str:
    """Return equivalent SQL in which no quoted name or literal contains a line end.

    The SQL can then be split into lines.
    """
    return _QUOTED_TEXT.sub(_without_line_end, text) if "\n" in text else text


def _without_line_end(match: re.Match[str]) -> str:
    token = match[0]
    if "\n" not in token:
        return token
    if match["name"]:
        return "U&" + token.replace("\\", "\\\\").replace("\n", "\\000a")
    if not match["escaped"]:
        token = "E" + token.replace("\\", "\\\\")
    return token.replace("\n", "\\n")


def _without_schema(text: str, name: str, schema: str) -> str:
    """Return the definition of a function, or of statistics, with its schema's name removed or
    replaced.

    :param schema: the quoted name of the schema.
    """
    head, _, tail = text.partition(f"{schema}.")
    text = head.removeprefix("CREATE OR REPLACE ")
    text = ("" if text.startswith("CREATE") else "CREATE ") + text
    if name.startswith(_ID_FUNCTION):
        tail = _SHARD_NUMBER.sub("NULL", tail)
    plain = _plain(schema)
    pattern = rf'"{re.escape(plain.replace(chr(34), chr(34) * 2))}"(?=\s*\.)'
    if schema == plain:
        pattern += rf'|(?<![\w$".\']){re.escape(plain)}(?=\s*\.\s*["\w])'
    tail = re.sub(pattern, quoted(SCHEMA), tail)
    path = re.compile(r"^ SET search_path TO .*$", re.MULTILINE)
    # In a line such as SET search_path TO 'photos_00042', the server writes the name of the schema
    # as a literal, not as an identifier. So replace the literal, too.
    own, placeholder = (f"'{name.replace(chr(39), chr(39) * 2)}'" for name in (plain, SCHEMA))
    tail = path.sub(lambda line: line[0].replace(own, placeholder), tail)
    return text + tail


def in_schema(definition: str, schema: str) -> str:
    """Return a function's definition for ``schema``, in which the name of ``schema`` replaces the
    placeholder :data:`SCHEMA`.
    """
    definition = definition.replace(quoted(SCHEMA), quoted(schema))
    return definition.replace(literal(SCHEMA), literal(schema))


def _plain(identifier: str) -> str:
    if identifier.startswith('"'):
        return identifier[1:-1].replace('""', '"')
    return identifier
