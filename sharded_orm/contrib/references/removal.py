"""Removes the copies of rows that are about to be deleted, before the rows themselves.

So no row on a shard can begin to refer to a row that goes. The shard notes which copies it has removed,
in the same transaction: whoever comes later finds the global row gone, or restores the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, IntegrityError, connections, transaction

from sharded_orm.contrib.references.declaration import groups, shards
from sharded_orm.contrib.references.delivery import states_on
from sharded_orm.contrib.references.differences import delete_copies, writing_copies
from sharded_orm.contrib.references.exceptions import ReferenceRowKept
from sharded_orm.contrib.references.versions import lock, note_removed
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.moves.confirmation import in_transaction


def remove_ahead(model: Any, pks: Sequence[Any]) -> None:
    """Delete the copies of rows on all shards, in a transaction of each shard.

    Called in the transaction that is about to delete the rows, which holds the lock from now on.

    :raises ReferenceRowKept: rows of a shard refer to one of the rows, a shard does not answer, or this
        thread has an open transaction on a shard.
    """
    _refuse_open_transactions(model)
    lock()
    for shard in shards():
        try:
            with transaction.atomic(using=shard.alias), writing_copies():
                state = states_on(shard.alias).get(model._meta.label)
                if state is None:
                    continue  # The shard is not filled yet.
                note_removed(shard.alias, model, state, pks)
                delete_copies(model, shard.alias, pks)
        except IntegrityError as exc:
            raise ReferenceRowKept(
                f"Rows of {model._meta.label} were not deleted: rows on {shard.alias!r} refer to them ({exc})."
                " Delete or change those first. If rows of other reference tables referred to them, commit"
                " their changes first."
            ) from exc
        except (Error, ShardedOrmError) as exc:
            raise ReferenceRowKept(
                f"Rows of {model._meta.label} were not deleted: {shard.alias!r} cannot say whether its rows"
                f" refer to them ({exc}). Try again when it answers."
            ) from exc


def _refuse_open_transactions(model: Any) -> None:
    global_connection: Any = connections[DEFAULT_DB_ALIAS]
    if any(block._from_testcase for block in global_connection.atomic_blocks):
        return  # In a TestCase there is an open transaction on each database.
    for group in groups():
        if in_transaction(group):
            raise ReferenceRowKept(
                f"Rows of {model._meta.label} were not deleted: a transaction is open on the group"
                f" {group!r}, and their copies on its shards have to be deleted first, in transactions of"
                " their own. Delete them outside of it."
            )
