"""What a schema looks like, as a value: compared, fingerprinted, built again.

Pure. The backends fill it (``schema_snapshot``) and make it come true (``build_schema``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: ``django_migrations`` of a shard also holds the markers of operations that are under way;
#: Django ignores them, as it does every row of a migration that does not exist.
MARKER_APP = "sharded_orm"
MARKER_PREFIX = "run "

_KIND = re.compile(r"CREATE\s+(?:.*?\s)??(TABLE|VIEW|INDEX|TRIGGER|FUNCTION|PROCEDURE|SEQUENCE)\b",
                   re.IGNORECASE)  # fmt: skip
_IS_TABLE = re.compile(r"CREATE\s+TABLE\b", re.IGNORECASE)
_ELEMENT_NAME = re.compile(r'(?:[A-Z]+ )*[`"]([^`"]+)[`"]')
_KEY = re.compile(
    r"(PRIMARY KEY|(?:UNIQUE |FULLTEXT |SPATIAL )?KEY|CONSTRAINT|UNIQUE|CHECK|FOREIGN)\b"
)


@dataclass(frozen=True)
class SchemaSnapshot:
    """The definitions of one schema, without its rows.

    :param definitions: name of a table, view, … -> the statement that makes it, as the server
        tells it, without the next number of a table. What has names of its own beside those of
        tables is named with its kind (``trigger x``).
    :param defaults: character set and collation of new tables, where schemas have such.
    :param counters: name of a table -> the next number that it gives, where the server tells.
    """

    definitions: Mapping[str, str] = field(repr=False)
    defaults: str = ""
    counters: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex. The order of tables, columns and keys does not matter."""
        digest = hashlib.sha256(self.defaults.encode())
        for name in sorted(self.definitions):
            head, elements, tail = _in_any_order(self.definitions[name])
            for part in (name, head, *elements, tail):
                digest.update(b"\0" + part.encode())
        return digest.hexdigest()

    def looks_like(self, other: SchemaSnapshot) -> bool:
        """Whether the fingerprints are equal; most often without making them."""
        return self.changed_tables(other) == []

    @cached_property
    def is_transactional(self) -> bool:
        """Whether a rollback takes rows back in all tables."""
        tails = (_split(definition)[2] for definition in self.definitions.values())
        return all("ENGINE=" not in tail or "ENGINE=InnoDB" in tail for tail in tails)

    @property
    def is_empty(self) -> bool:
        return not self.definitions

    def changed_tables(self, other: SchemaSnapshot) -> list[str] | None:
        """The tables that are defined in another way in ``other``; None if that is not all that
        is different."""
        theirs = other.definitions
        if self.definitions.keys() != theirs.keys() or self.defaults != other.defaults:
            return None
        changed = [name for name, mine in self.definitions.items() if not _same(mine, theirs[name])]
        return changed if all(_IS_TABLE.match(theirs[name]) for name in changed) else None

    def differences(self, other: SchemaSnapshot) -> list[str]:
        """What is different here from ``other``, in sentences; empty if the fingerprints are equal."""
        if self.looks_like(other):
            return []
        found = []
        if self.defaults != other.defaults:
            found.append(
                f"the schema's defaults are {self.defaults!r} instead of {other.defaults!r}"
            )
        for name in sorted({*self.definitions, *other.definitions}):
            mine, theirs = self.definitions.get(name), other.definitions.get(name)
            kind = kind_of(theirs or mine or "")
            what = f"{kind} {name.removeprefix(f'{kind} ')!r}"
            if mine is None or theirs is None:
                found.append(f"{what} {'is missing' if mine is None else 'is not expected'}")
            elif mine != theirs:
                found += [f"{what}: {change}" for change in _changes(mine, theirs)]
        return found


def kind_of(definition: str) -> str:
    """``table``, ``view``, ``index``, ``trigger``, …"""
    match = _KIND.match(definition)
    return match[1].lower() if match else "object"


def applied_digest(applied: Iterable[tuple[str, str]]) -> str:
    """A digest of the migrations (app, name) that a shard has applied; their order is no part.

    Equal to what MySQL computes for ``applied_digests``: their number, and half of each one's
    MD5, XORed. (All of it would take the server twice as long.)
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
    ours = {_element_name(element): element for element in my_elements}
    model = {_element_name(element): element for element in their_elements}
    for name in sorted({*ours, *model}):
        have, expected = ours.get(name), model.get(name)
        if have is None:
            yield f"{name} is missing"
        elif expected is None:
            yield f"{name} is not expected"
        elif have != expected:
            yield f"{name} is {have!r} instead of {expected!r}"
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
    """Head, columns and keys, tail of ``CREATE TABLE``; other statements are all head."""
    if not _IS_TABLE.match(definition):
        return definition, [], ""
    # MySQL and MariaDB tell one column or key a line, and no line has an end of line in it.
    head, lines, rest = definition.partition("(\n  ")
    if lines:
        body, _, tail = rest.partition("\n)")
        return head.strip(), body.split(",\n  "), tail.strip()
    # SQLite keeps what was written.
    head, _, rest = definition.partition("(")
    elements, tail = _by_commas(rest)
    return head.strip(), elements, tail.strip()


def _by_commas(text: str) -> tuple[list[str], str]:
    """The parts of a list in parentheses, whose opening one was read, and what follows it."""
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
