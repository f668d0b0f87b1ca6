"""What a statement changes, and whether it may be run again after it was interrupted."""

from __future__ import annotations

import re
from enum import Enum

# Matches statements that change nothing but the schema. If the schema is as before, such a statement
# has had no effect. A statement that also matches one of the next two patterns is an exception.
_REPEATABLE = re.compile(
    r"\s*(ALTER\s+TABLE|CREATE|DROP|ANALYZE|OPTIMIZE|COMMENT)\b", re.IGNORECASE
)
_MOVES_ROWS = re.compile(r"\b(PARTITION|TABLESPACE|SELECT)\b", re.IGNORECASE)
# Matches several statements in one text, of which some may have run.
_SEVERAL = re.compile(r";\s*\S")


class Effect(Enum):
    """What one statement changes."""

    NOTHING = "nothing"
    """The statement reads, or begins or ends a transaction."""
    ROWS = "rows"
    """The statement changes rows, which a rollback restores."""
    SCHEMA = "schema"
    """The statement changes tables or anything else, and may commit implicitly."""


def is_repeatable(sql: str) -> bool:
    """Whether ``sql`` may be run again, given that the schema is as it was before ``sql`` was run.

    False if the statement can move or remove rows, as ``TRUNCATE`` and ``RENAME`` do, and if ``sql``
    has several statements.
    """
    return _REPEATABLE.match(sql) is not None and not (
        _MOVES_ROWS.search(sql) or _SEVERAL.search(sql)
    )
