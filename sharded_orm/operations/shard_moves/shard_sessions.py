"""The database sessions with which a mover works on a shard's schema on one node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Self

from django.db.utils import load_backend

from sharded_orm import database_settings
from sharded_orm.backends.change_capture import ChangeCapture
from sharded_orm.backends.row_copy import RowCopy
from sharded_orm.backends.schema_move import SchemaMove
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard


class SchemaSessions:
    """Database sessions for different tasks of a move on the schema of ``shard``. For one thread.

    Each session is opened at its first use, and closed at the end of the ``with`` block. All
    sessions except :attr:`wrapper` log in with the node's account ``OPERATOR``, if there is one.

    :param shard: the shard, with the node to which the sessions connect. In the topology, the shard
        can be on another node.
    :param confirm: called before each change of the tables. It raises an error if this process must
        not change them, for example because another process has taken over the run.
    """

    def __init__(self, shard: Shard, confirm: Callable[[], None]) -> None:
        self.shard = shard
        self._confirm = confirm
        self._account = database_settings.operator_settings(shard.node)
        self._stack = ExitStack()

    @cached_property
    def wrapper(self) -> Any:
        """A connection object with the application's account.

        Django's connection to the shard is not used, because it may lead to another node.
        """
        settings = database_settings.shard_settings(self.shard)
        del settings["SHARD"]
        backend = load_backend(settings["ENGINE"])
        wrapper = backend.DatabaseWrapper(complete(settings), self.shard.alias)
        self._stack.callback(wrapper.close)
        return wrapper

    @cached_property
    def schema(self) -> SchemaMove:
        opened: SchemaMove = self.wrapper.schema_move(self._confirm, self._account)
        return self._stack.enter_context(opened)

    @cached_property
    def capture(self) -> ChangeCapture:
        opened: ChangeCapture = self.wrapper.change_capture(self._account)
        return self._stack.enter_context(opened)

    @cached_property
    def rows(self) -> RowCopy:
        opened: RowCopy = self.wrapper.row_copy(self._account)
        return self._stack.enter_context(opened)

    def close(self) -> None:
        """Close all sessions. The next use opens new ones."""
        for name in ("wrapper", "schema", "capture", "rows"):
            self.__dict__.pop(name, None)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
