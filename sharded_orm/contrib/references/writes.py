"""Follows the ORM's writes of reference tables: records those in the global database, and refuses
those of the copies on shards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS
from django.db.models.sql.subqueries import DeleteQuery, InsertQuery, UpdateQuery

from sharded_orm.contrib.mirrors.capture import SourceWrite
from sharded_orm.contrib.mirrors.exceptions import WriteNotFollowed
from sharded_orm.contrib.mirrors.transaction import (
    DeferrableDelivery,
    SourceChange,
    TransactionChanges,
)
from sharded_orm.contrib.references.backend import in_test_case
from sharded_orm.contrib.references.declaration import ReferenceSource, groups
from sharded_orm.contrib.references.delivery import bring_all
from sharded_orm.contrib.references.differences import is_writing_copies
from sharded_orm.contrib.references.exceptions import CopyReadOnly
from sharded_orm.contrib.references.models import ReferenceModel
from sharded_orm.contrib.references.removal import remove_ahead
from sharded_orm.contrib.references.versions import has_tables, record

logger = logging.getLogger("sharded_orm.references")


def follower_of(model: Any) -> ReferenceFollower | None:
    """Return the object that the ORM calls when it writes the reference model ``model``.

    None for other models.
    """
    meta = getattr(model, "_meta", None)
    if meta is None or not apps.models_ready:
        return None
    # Migrations use historical models. Find the current model with the same label.
    if meta.apps is not apps:
        try:
            model = apps.get_model(meta.label)
        except LookupError:
            return None
    if not issubclass(model, ReferenceModel):
        return None
    return ReferenceFollower(model._meta.concrete_model)


class ReferenceFollower:
    """Records each write of a reference table in the transaction of the write. Refuses writes of
    copies.

    Implements :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower`. Thread-safe.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def concerns(self, query: Any) -> bool:
        return True

    def write(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        """Execute a statement, and record the rows that it changes.

        If it deletes rows, their copies on the shards are deleted first.

        :param compiler: the compiler of the statement.
        :param execute: a function that executes the statement.
        :raises CopyReadOnly: the statement writes copies on a shard.
        :raises WriteNotFollowed: it is unknown which rows the statement changes.
        :raises ReferenceRowKept: a copy of a row that is to be deleted cannot be deleted.
        """
        connection = compiler.connection
        if connection.alias != DEFAULT_DB_ALIAS:
            if getattr(connection, "shard", None) is not None and not is_writing_copies():
                raise CopyReadOnly(
                    f"The rows of {self._model._meta.label} on {connection.alias!r} are copies, which follow"
                    f" the global rows. Write {self._model.__name__} without using().",
                )
            return execute()
        source = ReferenceSource(self._model)
        changes: Any = ReferenceChanges.of(connection)
        change: ReferenceChange = changes.add(source)
        query = compiler.query
        write = ReferenceWrite(source, compiler, change)
        if isinstance(query, InsertQuery):
            rows, result = write.insert(execute)
        elif isinstance(query, UpdateQuery | DeleteQuery):
            rows, result = write.change(execute)
        else:
            raise WriteNotFollowed(
                f"A statement of {type(query).__name__} writes {self._model.__name__}, which is a reference"
                " table, and it is unknown which rows it changes. Use save(), update() or delete()."
            )
        if rows:
            change.pks = [row.pk for row in rows]
            changes.deliver_after_commit()
        change.is_complete = True
        return result


class ReferenceWrite(SourceWrite):
    """One statement that writes rows of a reference table in the global database."""

    def _execute_on(self, pks: Sequence[Any], execute: Callable[[], Any]) -> Any:
        if pks and isinstance(self._query, DeleteQuery):
            remove_ahead(self._source.model, pks)
        return super()._execute_on(pks, execute)


class ReferenceChange(SourceChange):
    """The rows of a reference table that one statement has changed.

    ``pks`` has their primary keys.
    """

    pks: Sequence[Any] = ()


class ReferenceChanges(TransactionChanges):
    """The changes of reference tables in one transaction of the global database."""

    #: True if changes were recorded, and the copies on the shards were not updated since.
    _has_news = False

    def add(self, source: Any) -> ReferenceChange:
        change = ReferenceChange(source)
        self._changes.append(change)
        return change

    def savepoint_rolled_back(self, sid: str) -> None:
        super().savepoint_rolled_back(sid)
        # Changes may have been recorded inside of this savepoint, by a call of may_commit() there.
        # The rollback has then undone these records. So mark all changes as not recorded. A row may
        # be recorded twice, which does no harm.
        for change in self._changes:
            change.is_delivered = False

    def _record(self) -> None:
        """Record the rows that were changed and are not recorded yet. Called before the commit.

        This raises the version, which stays locked until the commit. So versions grow in the order
        of commits.
        """
        changes = [
            change
            for change in self._changes
            if isinstance(change, ReferenceChange) and not (change.is_undone or change.is_delivered)
        ]
        rows: dict[Any, set[Any]] = {}
        for change in changes:
            if change.pks:
                rows.setdefault(change.source.model, set()).update(change.pks)
        if rows and has_tables():
            record(rows)
            self._has_news = True
        # Set the flags only after record(). If record() raises an error and the program catches it,
        # the flags are not set, so the next call records the changes again.
        for change in changes:
            change.is_delivered = True

    def _deliver(self) -> None:
        self._hook = None
        if not self._may_deliver:
            return
        # Usually before_commit() has recorded the changes already. But in a TestCase nothing is
        # committed, so before_commit() was not called. Record the changes here.
        self._record()
        if self._has_news:
            self._has_news = False
            CopyDelivery(groups())()


class CopyDelivery(DeferrableDelivery):
    """Updates the copies on all shards, after the commit of a transaction that has changed
    reference tables.
    """

    def __call__(self) -> None:
        # Usually a delivery waits until this thread has no open transaction on shards. In a
        # TestCase, transactions end only after the test, so the copies are updated at once.
        if in_test_case():
            self.deliver(may_be_rolled_back=True)
        else:
            super().__call__()

    def deliver(self, *, may_be_rolled_back: bool) -> None:
        for problem in bring_all().problems:
            # Only log the problem, because the transaction of the program is committed already. A
            # relay ("manage.py mirrors relay") will try to update the copies again.
            logger.warning("copies of reference tables follow later, by a relay: %s", problem)
