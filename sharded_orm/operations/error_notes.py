"""The text of an error with its notes, which name the session that a database error was in."""

from __future__ import annotations

from sharded_orm.operations.runs.journal import one_line


def with_notes(exc: BaseException) -> str:
    """Return the type, message and notes of an exception in one line, without a full stop at the end.

    A note says, for example, that the session was that on the target of a move.
    """
    return " ".join([f"{one_line(exc).rstrip('.')}.", *getattr(exc, "__notes__", [])]).rstrip(".")
