"""Add a note to database errors of a shard that names the shard and its node."""

from __future__ import annotations

import re
from typing import Any

from django.db import Error
from django.db.utils import DatabaseErrorWrapper

from sharded_orm.backends.fence_messages import is_refusal, is_side_refusal
from sharded_orm.backends.missing_parts import is_missing_column, is_missing_table
from sharded_orm.backends.two_phase.branch import note_orphans
from sharded_orm.exceptions import KeyFenced, SideFenced
from sharded_orm.topology.model import Shard


class ShardErrorWrapper(DatabaseErrorWrapper):
    """Turns the driver's errors into Django's errors, with a note that names the shard and its node.

    A server's message, such as "Can't connect to MySQL server", names neither of them. Tracebacks, logs
    and Django's error pages show the note (``__notes__``). Arguments and text of the error stay those
    of the driver, because programs read them.

    :param wrapper: the connection object of a shard.
    """

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper)
        self._wrapper = wrapper

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if exc_type is None:
            return
        if isinstance(exc_value, BaseException):
            refusal = self._refusal(exc_value)
            if refusal is not None:
                # Make Django test the connection later, as Django's own __exit__() does after an
                # error.
                self._wrapper.errors_occurred = True
                raise refusal from exc_value
        try:
            super().__exit__(exc_type, exc_value, traceback)
        except Error as exc:
            add_shard_note(exc, self._wrapper.shard)
            _add_note_of_locked_file(exc, self._wrapper)
            is_missing = is_missing_table(exc) or is_missing_column(exc)
            # Inside a migration, the advice to migrate would be no help.
            if is_missing and not self._wrapper.open_editors:
                exc.add_note(
                    "If it is of a sharded model, the shard lacks a migration: 'manage.py shards status'"
                    " names such shards, and 'manage.py migrate_shards' migrates them. The rows of other"
                    " models are in the global database."
                )
            if self._wrapper.in_two_phase:
                note_orphans(exc, self._wrapper)
            raise

    def _refusal(self, error: BaseException) -> KeyFenced | SideFenced | None:
        """Return KeyFenced or SideFenced if ``error`` says that a fence has refused the write;
        otherwise None.
        """
        shard = self._wrapper.shard
        if is_refusal(error):
            return KeyFenced(
                f"Shard {shard.alias!r} has refused a write, because the shard key of the row is moving to"
                " another shard or has moved there. Nothing was written. Run the transaction again."
            )
        if is_side_refusal(error):
            fenced = SideFenced(
                f"Node {shard.node!r} has refused a write to shard {shard.alias!r}, because the other"
                " server of the pair is the active side, or becomes it. Nothing was written. Run the"
                " transaction again."
            )
            fenced.alias = self._wrapper.alias
            return fenced
        return None


class SessionErrorWrapper(DatabaseErrorWrapper):
    """Turns the driver's errors into Django's errors, with a note that names the alias and the
    database.

    For sessions that the library opens for itself, outside of a shard's connection object. For
    example, a move of a key has one session on each of the two shards.

    :param wrapper: a connection object of Django's own backend.
    """

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper)
        self._wrapper = wrapper

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        try:
            super().__exit__(exc_type, exc_value, traceback)
        except Error as exc:
            settings = self._wrapper.settings_dict
            address = f"{settings['HOST']}:{settings['PORT']}".strip(":")
            place = f"server {address!r}" if address else f"database {str(settings['NAME'])!r}"
            exc.add_note(f"This was on {self._wrapper.alias!r}, {place}.")
            _add_note_of_locked_file(exc, self._wrapper)
            raise


def _add_note_of_locked_file(error: Error, wrapper: Any) -> None:
    """If ``error`` says that SQLite did not get a lock in time, add a note that names the file and
    the remedy.
    """
    if getattr(error.__cause__, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
        error.add_note(
            f"Another process, or another connection, has locked the file {str(wrapper.settings_dict['NAME'])!r}"
            " for longer than OPTIONS['timeout']. End the transaction that holds the lock, and run this"
            " again."
        )


def add_shard_note(error: Error, shard: Shard) -> None:
    """Add a note to ``error`` that names the shard and its node."""
    error.add_note(f"This was on shard {shard.alias!r}, node {shard.node!r}.")


def noted_alias(error: Exception) -> str | None:
    """Return the alias of the shard in the note of :func:`add_shard_note`; None without such a note."""
    for note in getattr(error, "__notes__", ()):
        if match := re.match(r"This was on shard '(\w+)', node ", note):
            return match[1]
    return None
