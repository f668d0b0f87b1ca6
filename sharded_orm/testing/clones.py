"""The base class for creating test shards as clones of a template, for all kinds of databases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from django.db.utils import load_backend

from sharded_orm import database_settings
from sharded_orm.models.after_migrate.auto_increment import first_ids
from sharded_orm.topology.model import Shard


class Cloner(ABC):
    """Creates test shards with the tables and rows of a template, the schema that was migrated.

    Not thread-safe: the caller must hold a lock.
    """

    @abstractmethod
    def create_template(self, template: Shard, *, keep: bool) -> None:
        """Create the database of the template, the schema that test shards are clones of.

        :param keep: True to use an existing database with its tables and rows; False to replace it.
        """

    @abstractmethod
    def load_template(self, template: Shard) -> None:
        """Read the tables and rows of the template, so that test shards can be created from them.

        Called after the template was migrated.
        """

    @abstractmethod
    def clone(self, shard: Shard, *, keep: bool) -> None:
        """Create the database of ``shard`` as a clone of the template.

        :param keep: False to replace an existing database. If True, an existing database that has
            the template's tables may be kept. Then only its rows are replaced.
        """

    @abstractmethod
    def restore(self, shard: Shard) -> None:
        """Replace the rows of ``shard``, which is a clone, by the rows of the template."""

    def reset_sequences(self, shards: Iterable[Shard]) -> None:
        """Reset the counters (AUTO_INCREMENT) of all tables of ``shards``.

        The method of this base class does nothing. A subclass need not override it if its
        :meth:`restore` resets the counters anyway.
        """
        return

    def batch(self) -> AbstractContextManager[None]:
        """Return a context manager for a ``with`` block that calls several methods of the cloner.

        In a subclass, the context manager may let these calls share connections. In this base
        class, it does nothing.
        """
        return nullcontext()

    @abstractmethod
    def drop(self, shards: Iterable[Shard]) -> None:
        """Drop the databases of ``shards``. A database that does not exist is ignored."""


class ServerCloner(Cloner):
    """Creates test shards on database servers. Has at most one open session for each node."""

    def __init__(self) -> None:
        # Maps the name of each node to its open cursor. The cursors are closed at the end of the
        # outermost ``with`` block of batch().
        self._cursors: dict[str, Any] = {}
        self._in_batch = False

    @abstractmethod
    def _open(self, shard: Shard) -> Any:
        """Return a cursor with a new session on the shard's node. No schema is selected."""

    @abstractmethod
    def _drop(self, cursor: Any, schemas: Collection[str]) -> None:
        """Drop the schemas with the names ``schemas``. A schema that does not exist is ignored.

        :param cursor: a cursor on the node of the schemas.
        """

    def drop(self, shards: Iterable[Shard]) -> None:
        by_node: defaultdict[str, dict[str, Shard]] = defaultdict(dict)
        for shard in shards:
            by_node[shard.node][shard.schema] = shard
        for by_schema in by_node.values():
            with self._cursor(next(iter(by_schema.values()))) as cursor:
                self._drop(cursor, by_schema.keys())

    @contextmanager
    def batch(self) -> Iterator[None]:
        if self._in_batch:
            yield
            return
        self._in_batch = True
        try:
            yield
        finally:
            self._in_batch = False
            cursors, self._cursors = self._cursors, {}
            for cursor in cursors.values():
                cursor.db.close()

    @contextmanager
    def _cursor(self, shard: Shard) -> Iterator[Any]:
        """Return a context manager that yields a cursor on the shard's node.

        Inside a ``with`` block of :meth:`batch`, all calls for one node yield the same cursor. An
        earlier call may have selected a schema on it. The cursor's session is closed at the end of
        the block of :meth:`batch`. Outside of such a block, each call opens a new session, and
        closes it at the end of its own ``with`` block.
        """
        with self.batch():
            if shard.node not in self._cursors:
                self._cursors[shard.node] = self._open(shard)
            yield self._cursors[shard.node]

    @staticmethod
    def _begin_counters(cursor: Any, shard: Shard, tables: Collection[str]) -> None:
        """Make the counters of tables with packed ids begin at the shard's first id.

        A packed id contains the number of its shard, so the first id differs from shard to shard.

        :param cursor: a cursor in the shard's schema.
        :param tables: the tables that the shard has.
        """
        firsts = {table: first for table, first in first_ids(shard).items() if table in tables}
        if firsts:
            engine = load_backend(database_settings.shard_settings(shard)["ENGINE"])
            engine.DatabaseWrapper.ops_class.raise_counters(cursor, firsts)
