"""Sort the statements that create the objects of a schema, so that each object is created after
those that it uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from sharded_orm.backends.postgresql.definitions import (
    END,
    INVALID,
    OWNED_BY,
    USES_TABLES,
    in_schema,
)
from sharded_orm.backends.postgresql.sql_quotes import quoted
from sharded_orm.backends.snapshot import kind_of

# Kinds of objects, in the order of their creation. Objects of the kinds in the same tuple may need
# each other. Their order depends on which names are in their definitions.
_STAGES = (
    ("collation", "type", "domain", "function", "procedure"),
    ("sequence",),
    ("table",),
    ("index",),
    ("statistics",),
    ("late function", "view"),
    ("late index",),
    ("rule", "trigger", "policy"),
)
_FUNCTIONS = ("function", "procedure", "late function")
_INDEXED = re.compile(r' ON (?:ONLY )?("(?:[^"]|"")*"|[^\s"]+) USING ')
_NAMES = re.compile(r'"(?:[^"]|"")*"|[^\W\d][\w$]*')
# Matches the beginning of a function's body. Objects that are named only in the body may be created
# later, because the server does not check the body when it creates the function.
_BODY = re.compile(r"^AS \$\w+\$", re.MULTILINE)
# Matches constraints that are added after all tables and indexes. A foreign key may lead to a table
# that is created later. A NOT VALID constraint that is created together with its table would become
# valid.
_ADDED_LATER = re.compile(r'CONSTRAINT "(?:[^"]|"")*" (?:FOREIGN KEY |.* NOT VALID$)')


def statements(
    definitions: Mapping[str, str], missing: Iterable[str], schema: str
) -> Iterator[str]:
    """Yield the SQL statements that create some objects of a schema, in an order that works.

    :param definitions: the definitions of all objects of the schema, keyed as in
        :class:`SchemaSnapshot`.
    :param missing: the keys of the objects to create.
    :param schema: the name of the schema in which the statements will run.
    """
    by_kind: dict[str, list[str]] = {}
    for name in missing:
        by_kind.setdefault(_stage_kind(name, definitions), []).append(name)
    constraints: list[str] = []
    additions: list[str] = []
    for stage in _STAGES:
        names = [name for kind in stage for name in sorted(by_kind.get(kind, ()))]
        for name in _by_dependency(names, definitions) if len(stage) > 1 else names:
            definition, kind = definitions[name], kind_of(definitions[name])
            if kind in _FUNCTIONS:
                yield in_schema(definition, schema)
                continue
            statement, *others = definition.split(END)
            additions += others
            if kind == "sequence":
                statement, _, owner = statement.partition(OWNED_BY)
                if owner:
                    additions.append(f"ALTER SEQUENCE {quoted(name)} OWNED BY {owner}")
            elif kind == "table":
                statement, later = _without_later_constraints(statement)
                constraints += [f"ALTER TABLE {quoted(name)} ADD {element}" for element in later]
            yield statement.removesuffix(INVALID)
        if stage == ("index",):
            yield from constraints
    yield from additions


def unknown(definitions: Mapping[str, str]) -> list[str]:
    """Return the names of the objects in ``definitions`` that this module cannot create, because of
    their kind.
    """
    kinds = {kind for stage in _STAGES for kind in stage}
    return sorted(name for name, text in definitions.items() if kind_of(text) not in kinds)


def _stage_kind(name: str, definitions: Mapping[str, str]) -> str:
    definition = definitions[name]
    kind = kind_of(definition)
    if kind in ("function", "procedure") and definition.endswith(USES_TABLES):
        return "late function"
    if kind == "index" and (match := _INDEXED.search(definition)):
        relation = match[1]
        if relation.startswith('"'):
            relation = relation[1:-1].replace('""', '"')
        if kind_of(definitions.get(relation, "")) == "view":
            return "late index"
    return kind


def _by_dependency(names: list[str], definitions: Mapping[str, str]) -> list[str]:
    """Sort ``names`` so that each object comes after the objects that it uses.

    An object counts as using a second one if its definition contains the second one's name, even if
    the name is in fact that of a column. Objects that seem to use each other keep their order.
    """
    by_identifier: dict[str, list[str]] = {}
    for name in names:
        plain = name.removeprefix(f"{kind_of(definitions[name])} ").partition("(")[0]
        by_identifier.setdefault(plain, []).append(name)
    ordered: dict[str, None] = {}
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited:
            return
        visited.add(name)
        head = _BODY.split(definitions[name])[0]
        for token in sorted(set(_NAMES.findall(head))):
            identifier = token[1:-1].replace('""', '"') if token.startswith('"') else token
            for other in by_identifier.get(identifier, ()):
                visit(other)
        ordered[name] = None

    for name in names:
        visit(name)
    return list(ordered)


def _without_later_constraints(statement: str) -> tuple[str, list[str]]:
    head, opening, remainder = statement.partition("(\n  ")
    body, closing, tail = remainder.partition("\n)")
    elements = body.split(",\n  ")
    later = [element for element in elements if _ADDED_LATER.match(element)]
    kept = [element for element in elements if element not in later]
    return head + opening + ",\n  ".join(kept) + closing + tail, later
