"""The effect of a statement, and whether it may be run again after an interruption."""

from __future__ import annotations

import re
from enum import Enum

# If such a statement left the schema as it was, it has had no effect.
_REPEATABLE = re.compile(
    r"\s*(ALTER\s+TABLE|CREATE|DROP|ANALYZE|OPTIMIZE|COMMENT)\b", re.IGNORECASE
)
_MOVES_ROWS = re.compile(r"\b(PARTITION|TABLESPACE|SELECT)\b", re.IGNORECASE)
# Some of several statements may have run.
_SEVERAL = re.compile(r";\s*\S")


class Effect(Enum):
    """What one statement changes."""

    NOTHING = "nothing"
    """The statement reads, or begins or ends a transaction."""
    ROWS = "rows"
    """It changes rows, which a rollback restores."""
    SCHEMA = "schema"
    """It changes tables or anything else, and may commit implicitly."""


def is_repeatable(sql: str) -> bool:
    """Whether a statement that left the schema as it was may be run again.

    It may not if it can move or remove rows, as ``TRUNCATE`` and ``RENAME`` do, nor if ``sql`` is
    several statements.
    """
    return _REPEATABLE.match(sql) is not None and not (
        _MOVES_ROWS.search(sql) or _SEVERAL.search(sql)
    )
