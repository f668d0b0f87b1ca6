"""Creation of test shards as clones of a template: the base class for all kinds of databases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from sharded_orm.topology.model import Shard


class Cloner(ABC):
    """Creates test shards with the tables and rows of a template: the schema that was migrated.

    Not thread-safe: the caller must hold a lock.
    """

    @abstractmethod
    def create_template(self, template: Shard, *, keep: bool) -> None:
        """Create the template's database.

        :param keep: True to use an existing database with its tables and rows; False to replace it.
        """

    @abstractmethod
    def load_template(self, template: Shard) -> None:
        """Read the tables and rows of the template, for later clones.

        Called after the template was migrated.
        """

    @abstractmethod
    def clone(self, shard: Shard, *, keep: bool) -> None:
        """Create the database of ``shard`` as a clone of the template.

        :param keep: False to replace an existing database. If True, a database that has the
            template's tables may be kept, and only its rows are replaced by the template's.
        """

    @abstractmethod
    def restore(self, shard: Shard) -> None:
        """Replace the rows of ``shard``, which is a clone, by the rows of the template."""

    def reset_sequences(self, shards: Iterable[Shard]) -> None:
        """Reset the counters (AUTO_INCREMENT) of all tables of ``shards``.

        This base class does nothing. That is enough if :meth:`restore` also resets the counters.
        """
        return

    def batch(self) -> AbstractContextManager[None]:
        """Return a context manager for a ``with`` block that calls several methods of the cloner.

        A subclass may let these calls share connections. Here, the context manager does nothing.
        """
        return nullcontext()

    @abstractmethod
    def drop(self, shards: Iterable[Shard]) -> None:
        """Drop the databases of ``shards``. A database that does not exist is ignored."""
