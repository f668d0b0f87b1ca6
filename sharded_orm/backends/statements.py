"""Find out what a statement changes, and whether it may be run again after an interruption."""

from __future__ import annotations

import re
from enum import Enum

# Matches statements that change only the schema. If such a statement was interrupted and the schema is
# unchanged, the statement has had no effect, so it may be sent again. Some statements that change rows
# match, too. is_repeatable() excludes these by the patterns _MOVES_ROWS and _SEVERAL.
_REPEATABLE = re.compile(
    r"\s*(ALTER\s+TABLE|CREATE|DROP|ANALYZE|OPTIMIZE|COMMENT)\b", re.IGNORECASE
)
_MOVES_ROWS = re.compile(r"\b(PARTITION|TABLESPACE|SELECT)\b", re.IGNORECASE)
# A text with several statements must not be sent again, because some of them may already have run.
# This pattern finds such texts.
_SEVERAL = re.compile(r";\s*\S")


class Effect(Enum):
    """What one statement changes."""

    NOTHING = "nothing"
    """The statement only reads, or begins or ends a transaction."""
    ROWS = "rows"
    """The statement changes rows, which a rollback restores."""
    SCHEMA = "schema"
    """The statement changes tables or anything else that is not a row, and may commit implicitly."""


def is_repeatable(sql: str) -> bool:
    """Whether ``sql`` may be run a second time if it was interrupted and has not changed the
    schema.

    False if ``sql`` has several statements. Also False if the statement can move or remove rows and
    leave the schema as it was (``TRUNCATE``, ``RENAME``, …).
    """
    return _REPEATABLE.match(sql) is not None and not (
        _MOVES_ROWS.search(sql) or _SEVERAL.search(sql)
    )
