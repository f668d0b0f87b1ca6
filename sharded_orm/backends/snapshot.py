"""The definitions of all tables of a schema, as a value that can be compared with that of another
schema.

The module itself sends no queries. The connection object of each backend reads the value with
``schema_snapshot()``, and creates a schema from it with ``build_schema()``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: Each transaction in which an operation of a migration runs inserts a *marker row* into the table
#: ``django_migrations``, with this ``app`` and a ``name`` that begins with "run ". If the migration
#: is interrupted later, the row proves that the transaction was committed. Django ignores the rows,
#: because they belong to no existing migration.
MARKER_APP = "sharded_orm"
MARKER_PREFIX = "run "

#: The library creates some tables and triggers on shards for a while, such as the journal of
#: changed rows. Their names begin with this. Migrations do not create them, so comparisons of
#: schemas leave them out.
OWN_PREFIX = "sharded_orm_capture_"

_KIND = re.compile(
    r"CREATE\s+(?:.*?\s)??(TABLE|VIEW|INDEX|TRIGGER|FUNCTION|PROCEDURE|SEQUENCE|TYPE|DOMAIN|COLLATION"
    r"|STATISTICS|RULE|POLICY)\b",
    re.IGNORECASE,
)
_IS_TABLE = re.compile(r"CREATE\s+TABLE\b", re.IGNORECASE)
_ELEMENT_NAME = re.compile(r'(?:[A-Z]+ )*[`"]([^`"]+)[`"]')
_KEY = re.compile(
    r"(PRIMARY KEY|(?:UNIQUE |FULLTEXT |SPATIAL )?KEY|CONSTRAINT|UNIQUE|CHECK|FOREIGN)\b"
)


@dataclass(frozen=True)
class SchemaSnapshot:
    """The definitions of all tables, views, … of one schema, without rows.

    :param definitions: maps the name of each table, view, … to its ``CREATE`` statement, as the
        server shows it, but without AUTO_INCREMENT. The name of a trigger or routine begins with
        its kind (``trigger x``), because on MySQL a table may have the same name.
    :param defaults: SQL for the character set and collation of new tables; "" if the database has
        no such defaults for a schema.
    :param counters: maps the name of each table to its next AUTO_INCREMENT value. Tables for which
        the server shows no value are left out.
    :param shard_numbers: maps the name of each function that makes timestamped ids to the number of
        the shard in these ids. The definitions leave this number out, so that the schemas of two
        shards can be equal.
    """

    definitions: Mapping[str, str] = field(repr=False)
    defaults: str = ""
    counters: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    shard_numbers: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the definitions, in hex. The order of tables, columns and keys does not change it."""
        digest = hashlib.sha256(self.defaults.encode())
        for name in sorted(self.definitions):
            head, elements, tail = _in_any_order(self.definitions[name])
            for part in (name, head, *elements, tail):
                digest.update(b"\0" + part.encode())
        return digest.hexdigest()

    def looks_like(self, other: SchemaSnapshot) -> bool:
        """Whether both schemas have the same definitions, except for the order of columns and keys.
        Cheaper than a comparison of fingerprints, because it computes no digest.
        """
        return self.changed_tables(other) == []

    @cached_property
    def is_transactional(self) -> bool:
        """Whether a rollback undoes changes of rows in every table of the schema. False if a table
        has another engine than InnoDB, such as MyISAM.
        """
        tails = (_split(definition)[2] for definition in self.definitions.values())
        return all("ENGINE=" not in tail or "ENGINE=InnoDB" in tail for tail in tails)

    @property
    def is_empty(self) -> bool:
        return not self.definitions

    def changed_tables(self, other: SchemaSnapshot) -> list[str] | None:
        """Return the names of the tables whose definitions differ from those in ``other``.

        Return None if there is any other difference, such as a dropped table or a changed view.
        """
        theirs = other.definitions
        if self.definitions.keys() != theirs.keys() or self.defaults != other.defaults:
            return None
        changed = [name for name, mine in self.definitions.items() if not _same(mine, theirs[name])]
        return changed if all(_IS_TABLE.match(theirs[name]) for name in changed) else None

    def differences(self, other: SchemaSnapshot) -> list[str]:
        """Return sentences that describe how this schema differs from ``other``, the expected
        schema.

        The list is empty if both have the same fingerprint.
        """
        if self.looks_like(other):
            return []
        differences = []
        if self.defaults != other.defaults:
            differences.append(
                f"the schema's defaults are {self.defaults!r} instead of {other.defaults!r}"
            )
        for name in sorted({*self.definitions, *other.definitions}):
            mine, theirs = self.definitions.get(name), other.definitions.get(name)
            kind = kind_of(theirs or mine or "")
            what = f"{kind} {name.removeprefix(f'{kind} ')!r}"
            if mine is None or theirs is None:
                differences.append(f"{what} {'is missing' if mine is None else 'is not expected'}")
            elif mine != theirs:
                differences += [f"{what}: {change}" for change in _changes(mine, theirs)]
        return differences


def kind_of(definition: str) -> str:
    """Return what a ``CREATE`` statement creates, in lower case: ``table``, ``view``, ``index``, …"""
    match = _KIND.match(definition)
    return match[1].lower() if match else "object"


def table_parts(definition: str) -> tuple[dict[str, str], str]:
    """Split a ``CREATE TABLE`` statement into its columns, keys and constraints, and the text after
    them.

    The first value is a dict that maps a kind and name, such as ``column 'title'``, to the
    definition.
    """
    _, elements, tail = _split(definition)
    return {_element_name(element): element for element in elements}, tail


def applied_digest(applied: Iterable[tuple[str, str]]) -> str:
    """Return a digest of a set of applied migrations. Two shards with the same migrations have the
    same digest, whatever the order.

    The digest consists of the number of migrations, and the XOR of the first halves of their MD5
    sums. On MySQL, ``applied_digests`` lets the server compute the same digest. With whole MD5
    sums, the server would take twice as long.

    :param applied: pairs (app, name), one for each migration. Marker rows of running migrations are
        ignored.
    """
    count = digest = 0
    for app, name in applied:
        if app == MARKER_APP and name.startswith(MARKER_PREFIX):
            continue
        row = hashlib.md5(f"{app}/{name}".encode(), usedforsecurity=False).hexdigest()
        count, digest = count + 1, digest ^ int(row[:16], 16)
    return format_digest(count, digest)


def format_digest(count: int, digest: int) -> str:
    return f"{count}-{digest:016x}"


def _same(mine: str, theirs: str) -> bool:
    return mine == theirs or _in_any_order(mine) == _in_any_order(theirs)


def _in_any_order(definition: str) -> tuple[str, list[str], str]:
    head, elements, tail = _split(definition)
    return head, sorted(elements), tail


def _changes(mine: str, theirs: str) -> Iterator[str]:
    my_head, my_elements, my_tail = _split(mine)
    their_head, their_elements, their_tail = _split(theirs)
    mine_by_name = {_element_name(element): element for element in my_elements}
    theirs_by_name = {_element_name(element): element for element in their_elements}
    for name in sorted({*mine_by_name, *theirs_by_name}):
        actual, expected = mine_by_name.get(name), theirs_by_name.get(name)
        if actual is None:
            yield f"{name} is missing"
        elif expected is None:
            yield f"{name} is not expected"
        elif actual != expected:
            yield f"{name} is {actual!r} instead of {expected!r}"
    if (my_head, my_tail) != (their_head, their_tail):
        yield (
            f"it is {' … '.join(filter(None, (my_head, my_tail)))!r} instead of"
            f" {' … '.join(filter(None, (their_head, their_tail)))!r}"
        )


def _element_name(element: str) -> str:
    match = _ELEMENT_NAME.match(element)
    if match is None:
        return element
    key = _KEY.match(element)
    return f"{key[1].lower() if key else 'column'} {match[1]!r}"


def _split(definition: str) -> tuple[str, list[str], str]:
    """Split a ``CREATE TABLE`` statement into three parts: the text before the columns, a list of
    the columns and keys, and the text after them.

    For any other statement, the first part is the whole text, and the others are empty.
    """
    if not _IS_TABLE.match(definition):
        return definition, [], ""
    # MySQL and MariaDB show each column or key on a line of its own. They escape line ends inside
    # names and values. So the statement can be split at its line ends.
    head, lines, remainder = definition.partition("(\n  ")
    if lines:
        body, _, tail = remainder.partition("\n)")
        return head.strip(), body.split(",\n  "), tail.strip()
    # SQLite shows the CREATE TABLE statement as it was sent, with any white space. So it must be split
    # at its commas.
    head, _, remainder = definition.partition("(")
    elements, tail = _by_commas(remainder)
    return head.strip(), elements, tail.strip()


def _by_commas(text: str) -> tuple[list[str], str]:
    """Split the inside of a list in parentheses at its commas. Return its elements, and the text
    after the closing parenthesis.

    Commas in quotes or in inner parentheses do not count. For example, ``a int, b decimal(5, 2))
    STRICT`` has two elements, and the text after them is ``STRICT``.

    :param text: begins after the opening parenthesis, and goes beyond the closing one.
    """
    elements, depth, start, quote = [], 0, 0, ""
    for position, character in enumerate(text):
        if quote:
            if character == quote:
                quote = ""
        elif character in "'\"`":
            quote = character
        elif character == "(":
            depth += 1
        elif character == ")" and depth:
            depth -= 1
        elif character == ")" or (character == "," and not depth):
            elements.append(text[start:position].strip())
            start = position + 1
            if character == ")":
                break
    return elements, text[start:]
