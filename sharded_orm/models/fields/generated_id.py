"""The base class of fields for ids that contain the number of the row's shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from django.db import connections, models, transaction
from django.db.models.constants import OnConflict

from sharded_orm import database_settings, runtime
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.ids.layout import PackedLayout, TimestampedLayout
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import options_of
from sharded_orm.topology.model import Shard

#: A function that inserts rows on one database. Its argument is a sequence of fields. The function
#: returns the values of these fields for each row, as ``QuerySet._insert()`` does.
Insert = Callable[[Sequence[Any]], list[Any]]


class EmbeddedShardMixin:
    """A mixin for fields whose values are ids that contain the number of the row's shard.

    The ids are generated during the insert or just before it. If the id is the shard key, a new row
    may go to any shard that is open for new rows. If the model is created with the keyword argument
    ``near=row``, the new row goes to the shard of ``row``; see :func:`row_placement.place`.
    """

    layout: PackedLayout | TimestampedLayout
    attname: str
    name: str

    #: Whether no two rows have the same id, even if they are on different shards.
    unique_over_shards = True

    #: True if ``insert_rows()`` of this field opens a transaction around the insert. It is then
    #: called first, and ``insert_rows()`` of the model's other id fields runs inside the
    #: transaction. So if another field repeats a failed insert, the repetition is in the
    #: transaction, too.
    outermost = False

    @property
    def embedded_shard(self) -> tuple[int, int]:
        """The position and the width, both in bits, of the shard number in an id.

        They must equal ``SHIFT`` and ``BITS`` in the options of the strategy ``"embedded"``, if the
        strategy of the model's group is to find shards from these ids.
        """
        return self.layout.shard_shift, self.layout.shard_bits

    def contribute_to_class(self, cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
        super().contribute_to_class(cls, name, *args, **kwargs)  # type: ignore[misc]  # Field has this method
        key = getattr(getattr(cls, "ShardMeta", None), "shard_key", None)
        if key == name and not hasattr(cls, "near"):
            # Define ``near`` as a property, because Model.__init__(), create() and get_or_create()
            # accept the name of a property as a keyword, so ``near=`` works with them.
            cls.near = property(_get_near, _set_near)

    def insert_rows(
        self,
        instances: Sequence[Any],
        alias: str,
        returning: Sequence[Any],
        insert: Insert,
        on_conflict: OnConflict | None = None,
        unique_fields: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Insert ``instances`` on ``alias`` by calling ``insert``, and generate or check their ids.

        Return the rows that ``insert`` returns. The library calls this method for every insert of a
        sharded model, for one row or for many.
        """
        raise NotImplementedError

    def validate(self, value: Any, model_instance: models.Model | None) -> None:
        # Do not validate the id here. It may be empty until the row is saved, and the insert checks
        # an explicit id.
        return


@lru_cache(maxsize=1024)
def generated_id_fields(model: Any) -> tuple[EmbeddedShardMixin, ...]:
    """Return the fields of the model's own table that are of type :class:`EmbeddedShardMixin`.

    ``insert_rows()`` of the last of these fields is called first. It calls ``insert_rows()`` of the
    field before it, and so on. A field whose ``outermost`` is True must be called first, so it is
    sorted to the end.
    """
    # Use the concrete model, because a proxy model has no fields, and its rows are those of its
    # concrete model.
    fields: tuple[Any, ...] = tuple(model._meta.concrete_model._meta.local_concrete_fields)
    generated = [field for field in fields if isinstance(field, EmbeddedShardMixin)]
    return tuple(sorted(generated, key=lambda field: field.outermost))


def insert_with_ids(
    model: Any,
    rows: Sequence[Any],
    alias: str,
    returning: Sequence[Any],
    insert: Insert,
    **conflict: Any,
) -> list[Any]:
    """Insert ``rows`` on ``alias`` by calling ``insert``, and let the fields generate or check their ids.

    Return the rows that ``insert`` returns.

    :param returning: the fields whose values the INSERT returns.
    :param conflict: the arguments ``on_conflict`` and ``unique_fields`` of ``QuerySet._insert()``,
        which say what happens if a row conflicts with a stored row.
    """
    for field in generated_id_fields(model):
        insert = partial(
            field.insert_rows,
            rows,
            alias,
            insert=insert,
            on_conflict=conflict.get("on_conflict"),
            unique_fields=conflict.get("unique_fields"),
        )
    return insert(returning)


def all_or_nothing(alias: str) -> transaction.Atomic:
    """Return an atomic block on ``alias`` that always rolls its writes back after an exception.

    A plain ``transaction.atomic()`` does not always do so if autocommit is off.
    """
    # If autocommit is off, the outermost atomic block does not begin a transaction, because one is
    # open already. After an error in the block, the caller could still commit the rows that were
    # written in it. So use a savepoint.
    connection = connections[alias]
    needs_savepoint = not connection.in_atomic_block and not connection.get_autocommit()
    return transaction.atomic(using=alias, savepoint=needs_savepoint)


def shard_of(alias: str) -> Shard | None:
    """Return the shard whose alias is ``alias``, or None if there is no such shard.

    For example, a template schema, from which test shards are cloned, has an alias but is no shard.
    """
    if database_settings.template_group(alias) is not None:
        return None
    return runtime.topology().resolve(alias)


def forget_shard_choice(instances: Sequence[Any]) -> None:
    """Forget the row passed as ``near=``, or the shard that was drawn at random.

    Called after the rows were stored. If the project then copies a row, by setting its primary key
    to None and saving it again, a shard is chosen anew for the copy.

    :param instances: the model instances of the stored rows.
    """
    for row in instances:
        row._state.__dict__.pop("near", None)
        row._state.__dict__.pop("drawn_shard", None)


def _get_near(instance: Any) -> Any:
    return getattr(instance._state, "near", None)


def _set_near(instance: Any, row: Any) -> None:
    options = options_of(instance)
    row_options = options_of(row) if row is not None else options
    if options is None or row_options is None or row_options.group != options.group:
        row_name = describe(row) if isinstance(row, models.Model) else repr(row)
        raise CrossShardRelation(
            f"near={row_name} is no row of group {options.group if options else None!r}, in which"
            f" {instance.__class__.__name__} is stored: give a row of that group."
        )
    if row is not None and not instance._state.adding:
        raise CrossShardRelation(
            f"{describe(instance)} is stored and stays on {instance._state.db!r}: near= is for new"
            " rows."
        )
    instance._state.near = row
