"""The function :func:`atomic`: a transaction on the shard of a row or of a shard key, or on several
shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyRequired, TwoPhaseMisused
from sharded_orm.models.moves.confirmation import refuse_repetition
from sharded_orm.models.moves.transactions import moves_keys_now
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.topology.model import Shard
from sharded_orm.two_phase.block import TwoPhaseAtomic


def atomic(
    *rows: type[Model] | Model | str,
    savepoint: bool = True,
    durable: bool = False,
    two_phase: bool = False,
    **key: Any,
) -> transaction.Atomic:
    """Return ``transaction.atomic()`` for the shard of a row or of a shard key.

    ::

        with sharded_orm.atomic(Photo, user_id=1):
            ...
        with sharded_orm.atomic(sender, receiver, two_phase=True):
            ...

    If the key has no shard yet, a shard is chosen and recorded, because the block is about to write
    the key's rows. Without ``two_phase``, the transaction covers a single shard. If a program uses
    two such blocks for two shards, the shards commit one after the other, not atomically
    (Pinterest, P14). With ``two_phase``, all shards of the group that are used in the block commit,
    or none does. A shard is added to the transaction at its first use, so the shards need not be
    known when the block begins.

    :param rows: an instance of a sharded model, or the model class. With the class, pass one more
        keyword argument: the name and the value of the shard key. With ``two_phase``, pass any
        number of instances of one group, or the group's name.
    :param savepoint: passed to ``transaction.atomic()``.
    :param durable: passed to ``transaction.atomic()``.
    :param two_phase: whether to commit on all used shards together, in two phases.
    :raises ShardKeyRequired: the model has no shard key, or the keyword is not the shard key.
    :raises DanglingShardKey: the key is new, and the row to which it refers does not exist.
    :raises TwoPhaseMisused: the rows are not of one group, or there are several rows without
        ``two_phase``.
    :raises KeyMoved: the key has moved to another shard after the block has looked up its shard and
        before the transaction was open. Raised when the block is entered.

    A block with ``two_phase`` may raise errors of its own. When it is entered, it raises
    :exc:`TwoPhaseUnavailable` if the shards cannot commit in two phases, and :exc:`TwoPhaseMisused`
    if an ordinary transaction of the group is open. When it is left, it raises
    :exc:`CommitOutcomeUnknown` if the connection was lost during the commit that decides for all
    shards: then all shards commit, or none does. After any other error, nothing is committed.
    """
    if two_phase:
        return _two_phase_block(rows, key, savepoint, durable)
    if len(rows) != 1 or isinstance(rows[0], str):
        raise TwoPhaseMisused(
            f"atomic() was given {list(rows)!r}: without two_phase=True, it takes one row, or a model and"
            " the value of its shard key. Rows of several shards need two_phase=True. For a group, there is"
            " transaction.atomic(using=GROUP)."
        )
    options, find = _shard_of(rows[0], key)
    return _AtomicOnKey(options.group, find, savepoint, durable)


def _two_phase_block(
    rows: Sequence[type[Model] | Model | str],
    key: Mapping[str, Any],
    savepoint: bool,
    durable: bool,
) -> transaction.Atomic:
    groups = {row for row in rows if isinstance(row, str)}
    finders = []
    for row in rows:
        if not isinstance(row, str):
            options, find = _shard_of(row, key if isinstance(row, type) else {})
            groups.add(options.group)
            finders.append(find)
    if len(groups) != 1:
        raise TwoPhaseMisused(
            f"A block with two_phase=True is for rows of one group, or for the name of one, and"
            f" {list(rows)!r} are of {sorted(groups)!r}."
        )
    (group,) = groups
    runtime.group(group)
    return TwoPhaseAtomic(group, lambda: [find() for find in finders], savepoint, durable)


def _shard_of(
    model: type[Model] | Model, key: Mapping[str, Any]
) -> tuple[ShardOptions, Callable[[], str]]:
    """Return the shard options of ``model``, and a function that returns the alias of the shard.

    :param model: an instance, or a model class. With a class, ``key`` maps the name of the shard
        key to its value, as in ``{"user_id": 7}``.
    :raises ShardKeyRequired: the model has no shard key, or ``key`` is not the shard key.
    """
    cls = model if isinstance(model, type) else type(model)
    options = shard_options(cls)
    if options is None or options.key is None:
        raise ShardKeyRequired(
            f"{cls.__name__} is not a sharded model; use django.db.transaction.atomic()."
        )
    if isinstance(model, type):
        names = {options.key.name, options.key.attname}
        if len(key) != 1 or not names.issuperset(key):
            given = ", ".join(sorted(key)) or "no key"
            raise ShardKeyRequired(
                f"{cls.__name__} is sharded by {options.key.name!r}, and atomic() was given {given}: write"
                f" sharded_orm.atomic({cls.__name__}, {options.key.name}=…), or name a row."
            )
    return options, partial(_find_alias, options, model, key)


class _AtomicOnKey(transaction.Atomic):
    """An atomic block on the shard of a key.

    While the block begins, a running move may bring the key to another shard. Then the block raises
    an error. If an instance is used as a decorator, the shard is looked up again for each call of
    the decorated function.

    :param find: returns the alias of the shard.
    """

    def __init__(self, group: str, find: Callable[[], str], savepoint: bool, durable: bool) -> None:
        super().__init__(find(), savepoint, durable)
        self._group, self._find, self._durable = group, find, durable

    def _recreate_cm(self) -> _AtomicOnKey:
        # The base class contextlib.ContextDecorator calls this method for each call of the
        # decorated function. The new object looks up the shard again.
        return _AtomicOnKey(self._group, self._find, self.savepoint, self._durable)

    def __enter__(self) -> None:
        super().__enter__()
        if not moves_keys_now(self._group):
            return
        try:
            # Look up the shard again, because the key may have moved while the transaction was
            # opened. This look-up also makes the transaction remember that it uses the key on this
            # shard.
            if self._find() != self.using:
                refuse_repetition(self._group)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise


def _find_alias(options: ShardOptions, model: type[Model] | Model, key: Mapping[str, Any]) -> str:
    if isinstance(model, type):
        return _place(options, *key.values()).alias
    if not model._state.adding and model._state.db:
        return str(current_alias(options, model))
    return row_placement.place(options, model).alias


def _place(options: ShardOptions, value: Any) -> Shard:
    key = options.key
    assert key is not None
    if type(value) is int or type(value) is str:
        return row_placement.place_key(options, key.get_prep_value(value))
    # If the shard key is a foreign key, the value may be a model instance. If the value is None,
    # place() raises an error.
    name = key.name if isinstance(value, Model) else key.attname
    return row_placement.place(options, options.model(**{name: value}))
