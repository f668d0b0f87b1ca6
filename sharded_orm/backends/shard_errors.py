"""Add a note to database errors of a shard that names the shard and its node."""

from __future__ import annotations

from typing import Any

from django.db import Error
from django.db.utils import DatabaseErrorWrapper

from sharded_orm.backends.fence import is_refusal
from sharded_orm.exceptions import KeyFenced
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
        if isinstance(exc_value, BaseException) and is_refusal(exc_value):
            if not isinstance(exc_value, KeyFenced):
                # Set this as Django's method does, because Django reads it to know of an earlier error.
                self._wrapper.errors_occurred = True
                raise self._fenced() from exc_value
            return
        try:
            super().__exit__(exc_type, exc_value, traceback)
        except Error as exc:
            add_shard_note(exc, self._wrapper.shard)
            raise

    def _fenced(self) -> KeyFenced:
        shard = self._wrapper.shard
        return KeyFenced(
            f"Shard {shard.alias!r} has refused a write, because the shard key of the row is moving to"
            " another shard or has moved there. Nothing was written. Run the transaction again."
        )


def add_shard_note(error: Error, shard: Shard) -> None:
    """Add a note to ``error`` that names the shard and its node."""
    error.add_note(f"This was on shard {shard.alias!r}, node {shard.node!r}.")
