"""What a statement that changes a schema or its rows does, as far as a rerun is concerned."""

from __future__ import annotations

import re
from enum import Enum

# Without a visible change it changes nothing the second time either.
_REPEATABLE = re.compile(
    r"\s*(ALTER\s+TABLE|CREATE|DROP|ANALYZE|OPTIMIZE|COMMENT)\b", re.IGNORECASE
)
_MOVES_ROWS = re.compile(r"\b(PARTITION|TABLESPACE|SELECT)\b", re.IGNORECASE)
# There may be several, of which some were run.
_SEVERAL = re.compile(r";\s*\S")


class Effect(Enum):
    """Of one statement."""

    NOTHING = "nothing"
    """It reads, or begins or ends a transaction."""
    ROWS = "rows"
    """It changes rows, and a rollback takes that back."""
    SCHEMA = "schema"
    """It changes tables, or anything else; it may commit by itself."""


def is_repeatable(sql: str) -> bool:
    """Whether a statement that left the schema as it was may be run once more.

    No if it may have moved or removed rows, as ``TRUNCATE`` and ``RENAME`` do, or is several.
    """
    return _REPEATABLE.match(sql) is not None and not (
        _MOVES_ROWS.search(sql) or _SEVERAL.search(sql)
    )
