"""Deletes the copies of rows on the shards before the rows in the global database are deleted.

So no row on a shard can begin to refer to a row that is being deleted. In the same transaction,
each shard records which copies were deleted. If a row stays after all, the next update of the shard
finds it in this record, and restores its copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from django.db import Error, IntegrityError, transaction

from sharded_orm.contrib.references.backend import in_test_case
from sharded_orm.contrib.references.declaration import groups, shards
from sharded_orm.contrib.references.delivery import lock_states
from sharded_orm.contrib.references.differences import (
    copies_of,
    delete_copies,
    restore_copies,
    writing_copies,
)
from sharded_orm.contrib.references.exceptions import ReferenceRowKept
from sharded_orm.contrib.references.versions import has_tables, lock, note_removed, versions_on
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.moves.confirmation import in_transaction

logger = logging.getLogger("sharded_orm.references")


def remove_ahead(model: Any, pks: Sequence[Any]) -> None:
    """Delete the copies of rows of ``model`` on all shards, in one transaction per shard.

    Called in the transaction that then deletes the rows in the global database. This call takes the
    lock of the reference tables for the rest of that transaction. If a shard refuses, the copies on
    the other shards are restored.

    :param pks: the primary keys of the rows.
    :raises ReferenceRowKept: rows of a shard refer to one of the rows, a shard does not answer, or
        this thread has an open transaction on a shard.
    """
    if not has_tables():  # The tables of this app are not migrated yet, so no shard has copies.
        return
    _refuse_open_transactions(model)
    lock()
    removals: list[_Removal] = []
    for shard in shards():
        removal = _Removal(model, shard.alias)
        try:
            if removal.run(pks):
                removals.append(removal)
        except (Error, ShardedOrmError) as exc:
            for done in removals:
                done.undo()
            raise _kept(model, shard.alias, exc) from exc


def _kept(model: Any, alias: str, exc: Exception) -> ReferenceRowKept:
    if isinstance(exc, IntegrityError):
        return ReferenceRowKept(
            f"Rows of {model._meta.label} were not deleted: rows on {alias!r} refer to them ({exc})."
            " Delete or change those first. If rows of other reference tables referred to them, commit"
            " their changes first."
        )
    return ReferenceRowKept(
        f"Rows of {model._meta.label} were not deleted: {alias!r} cannot say whether its rows refer to"
        f" them ({exc}). Try again when it answers."
    )


class _Removal:
    """Deletes the copies of rows on one shard, and can restore them.

    The caller has taken the lock of the reference tables before, and holds it until the end.
    """

    def __init__(self, model: Any, alias: str) -> None:
        self._model, self._alias = model, alias
        self._copies: list[tuple[Any, ...]] = []
        self._before: Any = None
        self._noted = ""

    def run(self, pks: Sequence[Any]) -> bool:
        """Delete the copies. Return False if the shard has no copies of the model yet."""
        model, alias = self._model, self._alias
        with transaction.atomic(using=alias), writing_copies():
            state = lock_states(alias).get(model._meta.label)
            if state is None:
                return False
            self._copies = list(copies_of(model, alias, pks).values())
            self._before, self._noted = state, note_removed(alias, model, state, pks)
            delete_copies(model, alias, pks)
        return True

    def undo(self) -> None:
        """Restore the copies. If that fails, the next update of the shard restores them."""
        alias, before = self._alias, self._before
        try:
            with transaction.atomic(using=alias):
                # This process may have lost its connection to the global database, and with it the
                # lock of the reference tables. Then another process may have written newer copies,
                # which must stay. So restore the old copies only if the shard's version is still
                # as run() has left it.
                unchanged = versions_on(alias).filter(
                    pk=before.pk,
                    version=before.version,
                    history=before.history,
                    removed=self._noted,
                )
                if unchanged.update(removed=before.removed):
                    restore_copies(self._model, alias, self._copies)
        except (Error, ShardedOrmError) as exc:
            logger.warning("copies on %r are restored later, by a relay: %s", alias, exc)


def _refuse_open_transactions(model: Any) -> None:
    if in_test_case():
        return
    for group in groups():
        if in_transaction(group):
            raise ReferenceRowKept(
                f"Rows of {model._meta.label} were not deleted: a transaction is open on the group"
                f" {group!r}, and their copies on its shards have to be deleted first, in transactions of"
                " their own. Delete them outside of it."
            )
