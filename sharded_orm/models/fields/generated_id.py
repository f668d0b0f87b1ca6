"""The base of fields whose ids carry the number of their row's shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from django.db import models
from django.db.models.constants import OnConflict

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.ids.layout import PackedLayout, TimestampedLayout
from sharded_orm.models.sharding.options import describe, options_of
from sharded_orm.topology.model import Shard

#: A function that inserts rows and returns the values of the given columns, as
#: ``QuerySet._insert()`` does.
Insert = Callable[[Sequence[Any]], list[Any]]


class EmbeddedShardMixin:
    """An id that carries the number of its shard. The insert generates it, or code just before.

    If the id is the shard key, a new row may go to any shard. The argument ``near=row`` of the
    model chooses the shard of another row; see :meth:`ShardOptions.place`.
    """

    layout: PackedLayout | TimestampedLayout
    attname: str
    name: str

    #: Whether this field's insert wraps those of other fields. It opens a transaction, in which
    #: the others may fail and try again.
    outermost = False

    @property
    def embedded_shard(self) -> tuple[int, int]:
        """``SHIFT`` and ``BITS`` of the shard in an id, as of the embedded strategy."""
        return self.layout.shard_shift, self.layout.shard_bits

    def contribute_to_class(self, cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
        super().contribute_to_class(cls, name, *args, **kwargs)  # type: ignore[misc]  # a Field's
        key = getattr(getattr(cls, "ShardMeta", None), "shard_key", None)
        if key == name and not hasattr(cls, "near"):
            # Model.__init__(), create() and get_or_create() take properties as keywords.
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
        """Insert ``instances`` on ``alias`` with the right ids; return the rows of ``insert``.

        Called for every insert of a sharded model, of one row or many.
        """
        raise NotImplementedError

    def formfield(self, *args: Any, **kwargs: Any) -> Any:
        # Forms leave out generated ids.
        return None

    def validate(self, value: Any, model_instance: models.Model | None) -> None:
        # The id is empty until the row is saved; the insert checks an explicit id.
        return


@lru_cache(maxsize=1024)
def generated_id_fields(model: Any) -> tuple[EmbeddedShardMixin, ...]:
    """The fields of the model's own table whose ids the shard generates, outermost last."""
    # A proxy has no own fields, and stores rows of its concrete model.
    fields: tuple[Any, ...] = tuple(model._meta.concrete_model._meta.local_concrete_fields)
    generated = [field for field in fields if isinstance(field, EmbeddedShardMixin)]
    return tuple(sorted(generated, key=lambda field: field.outermost))


def shard_of(alias: str) -> Shard | None:
    """The shard that ``alias`` names; None for any other database.

    A group's template schema, from which test shards are cloned, is no shard.
    """
    if runtime.template_group(alias) is not None:
        return None
    return runtime.topology().resolve(alias)


def forget_shard_choice(instances: Sequence[Any]) -> None:
    """Remove ``near`` and the drawn shard of stored rows, so that copies do not inherit them."""
    for row in instances:
        row._state.__dict__.pop("near", None)
        row._state.__dict__.pop("drawn_shard", None)


def _get_near(instance: Any) -> Any:
    """The row whose shard ``instance`` will be stored on; None once it is stored."""
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
