"""The text of an error for an operator, with notes that say in which session the error occurred.

For example, the move of a shard has one session on the source and one on the target.
"""

from __future__ import annotations

from sharded_orm.operations.runs.journal import one_line


def with_notes(exc: BaseException) -> str:
    """Return the type, message and notes of an exception in one line, without a full stop at the end.

    A note says, for example, that the error occurred in the session on the target of a move.
    """
    return " ".join([f"{one_line(exc).rstrip('.')}.", *getattr(exc, "__notes__", [])]).rstrip(".")
