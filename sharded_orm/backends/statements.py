"""Find out from the text of a statement what it changes, and whether it may be run again after an
interruption.
"""

from __future__ import annotations

import re
from enum import Enum

# Matches statements that change the schema. If such a statement was interrupted, and the schema is
# as before, the statement has had no effect and may be sent again. Some of the matched statements
# also change rows. is_repeatable() excludes these with the next two patterns.
_REPEATABLE = re.compile(
    r"\s*(ALTER\s+TABLE|CREATE|DROP|ANALYZE|OPTIMIZE|COMMENT)\b", re.IGNORECASE
)
_MOVES_ROWS = re.compile(r"\b(PARTITION|TABLESPACE|SELECT)\b", re.IGNORECASE)
# Finds a text with several statements. Such a text must not be sent again after an interruption,
# because its first statements may already have run.
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
    """Whether ``sql`` may be sent again after it was interrupted, if the schema is as before.

    False if ``sql`` has several statements. Also False if it may have changed rows without changing
    the schema, as ``TRUNCATE`` does.
    """
    return _REPEATABLE.match(sql) is not None and not (
        _MOVES_ROWS.search(sql) or _SEVERAL.search(sql)
    )
