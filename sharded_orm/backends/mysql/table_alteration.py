"""Compare two definitions of a table on MariaDB, and change a table from one to the other.

This module sends no query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from sharded_orm.backends.snapshot import table_parts

# Patterns for one element of CREATE TABLE. _NAMED matches its beginning with the name of the
# column, key or constraint. _OPTIONS matches everything that may follow the type of a column.
_NAMED: Final = re.compile(r"(?:[A-Z]+ )*(`(?:[^`]|``)+`)")
_OPTIONS: Final = re.compile(r" (?:NOT NULL|NULL|DEFAULT|COMMENT)\b.*", re.DOTALL)


def alteration(table: str, present: str, wanted: str) -> str | None:
    """Return the ``ALTER TABLE`` that changes a table with the definition ``present`` into
    ``wanted``.

    Return None if the statement could lose values or would have to invent some. That is so if the
    present table lacks a wanted column, or if the types of a column differ.

    :param table: the quoted name of the table.
    :param present: a statement as ``SHOW CREATE TABLE`` shows it; likewise ``wanted``.
    """
    (mine, my_tail), (theirs, their_tail) = table_parts(present), table_parts(wanted)
    if not _keeps_values(mine, theirs):
        return None
    changes = [*_changes(mine, theirs)]
    if my_tail != their_tail:
        # A tail has the options after the columns, such as ENGINE. Empty the table's comment first,
        # because the tail sets a comment only if the wanted table has one.
        changes.append(f"COMMENT = '' {their_tail}")
    return f"ALTER TABLE {table} {', '.join(changes)}"


def demands(definition: str, other: str) -> list[str]:
    """Return the names of the constraints, unique keys and NOT NULL columns that ``other`` lacks.

    Because of them, the table ``definition`` may refuse rows that the table ``other`` accepts. Both
    arguments are statements as ``SHOW CREATE TABLE`` shows them.
    """
    (mine, _), (theirs, _) = table_parts(definition), table_parts(other)
    return [
        name
        for name, text in mine.items()
        if (text.startswith(("CONSTRAINT", "UNIQUE")) and theirs.get(name) != text)
        or (text.startswith("`") and "NOT NULL" in text and "NOT NULL" not in theirs.get(name, ""))
    ]


def _keeps_values(mine: dict[str, str], theirs: dict[str, str]) -> bool:
    if list(_columns(mine))[: len(list(_columns(theirs)))] != list(_columns(theirs)):
        return False
    return all(
        _OPTIONS.sub("", mine[name]) == _OPTIONS.sub("", definition)
        # If the present column is NOT NULL and the wanted one is not, NULLs may have been replaced by
        # other values. ALTER TABLE cannot restore these NULLs.
        and ("NOT NULL" in definition or "NOT NULL" not in mine[name])
        for name, definition in _columns(theirs).items()
    )


def _columns(parts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in parts.items() if text.startswith("`")}


def _changes(mine: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    for name, definition in mine.items():
        if name not in theirs:
            yield _drop(definition)
    for name, definition in theirs.items():
        if mine.get(name) == definition:
            continue
        if definition.startswith("`"):
            yield f"MODIFY COLUMN {definition}"
        else:
            if name in mine:
                yield _drop(mine[name])
            yield f"ADD {definition}"


def _drop(definition: str) -> str:
    match = _NAMED.match(definition)
    if match is None:
        return "DROP PRIMARY KEY"
    kind = "COLUMN"
    if not definition.startswith("`"):
        is_constraint = definition.startswith("CONSTRAINT")
        kind = "CONSTRAINT" if is_constraint else "INDEX"
    return f"DROP {kind} {match[1]}"
