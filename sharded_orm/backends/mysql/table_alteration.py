"""Compare two definitions of a table on MariaDB, and make the ALTER TABLE that changes one into the
other.

The module only handles texts; it sends no query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from sharded_orm.backends.snapshot import table_parts

# Patterns for one element of CREATE TABLE, such as "`name` varchar(50) NOT NULL". _NAMED matches
# its beginning, up to the name of the column, key or constraint. _OPTIONS matches all that may
# follow the type of a column.
_NAMED: Final = re.compile(r"(?:[A-Z]+ )*(`(?:[^`]|``)+`)")
_OPTIONS: Final = re.compile(r" (?:NOT NULL|NULL|DEFAULT|COMMENT)\b.*", re.DOTALL)


def alteration(table: str, present: str, wanted: str) -> str | None:
    """Return the ``ALTER TABLE`` that changes a table from the definition ``present`` to
    ``wanted``.

    Return None if such a statement is not safe. For example, it would lose values if the type of a
    column differs. Or ``wanted`` has a column that the present table lacks, and nobody knows which
    values this column should get.

    :param table: the quoted name of the table.
    :param present: the table's definition now, as ``SHOW CREATE TABLE`` shows it.
    :param wanted: the definition to reach, in the same form.
    """
    (mine, my_tail), (theirs, their_tail) = table_parts(present), table_parts(wanted)
    if not _keeps_values(mine, theirs):
        return None
    changes = [*_changes(mine, theirs)]
    if my_tail != their_tail:
        # The tail is what follows the columns, such as ENGINE. It sets a comment of the table only
        # if the wanted table has one. So first remove the comment that the present table may have.
        changes.append(f"COMMENT = '' {their_tail}")
    return f"ALTER TABLE {table} {', '.join(changes)}"


def demands(definition: str, other: str) -> list[str]:
    """Return the names of what may make one table refuse rows that another table accepts. These are
    the constraints, unique keys and NOT NULL columns that only the first table has.

    :param definition: definition of the first table, as ``SHOW CREATE TABLE`` shows it.
    :param other: definition of the other table, in the same form.
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
        # The present column is NOT NULL, and the wanted one may be NULL. Then the migration that
        # made the column NOT NULL may have replaced NULLs by other values. ALTER TABLE cannot bring
        # these NULLs back, so values are lost.
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
