"""The base class of objects: :class:`ShardedObject`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from django.core.exceptions import ValidationError
from django.db import connections, models
from django.utils.translation import gettext_lazy as _

import sharded_orm
from sharded_orm.compat import update_result
from sharded_orm.contrib.objects.body_column import (
    BodyColumn,
    VersionColumn,
    check_body,
    prepare_body,
)
from sharded_orm.contrib.objects.exceptions import (
    BodyTooLarge,
    ConcurrentEdit,
    InvalidObjectType,
    UnsavedChanges,
    UnstoredObject,
)
from sharded_orm.contrib.objects.fields import BodyField, values_were_read, values_were_saved
from sharded_orm.contrib.objects.object_queryset import ObjectManager
from sharded_orm.contrib.objects.options import (
    MAX_BODY,
    ObjectOptions,
    declared,
    names_of,
    read_meta,
    refuse_concrete_base,
)
from sharded_orm.models import PackedIDField
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.relations.model_class import ShardedModelBase
from sharded_orm.models.sharding.key_errors import describe

# The columns of the table of an object.
_COLUMNS = {"id", "data", "ts", "version", "active"}
# Until Django 6, save() accepts these arguments by position.
_SAVE = ("force_insert", "force_update", "using", "update_fields")


class ObjectBase(ShardedModelBase):
    """The metaclass of objects. Makes the id and ``ShardMeta`` from ``class ObjectMeta``."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any
    ) -> Any:
        meta = attrs.get("Meta")
        if not getattr(meta, "abstract", False) and not getattr(meta, "proxy", False):
            refuse_concrete_base(name, bases)
            options = _options(name, bases, attrs)
            _refuse_ambiguous_names(name, bases, attrs, options)
            pk = PackedIDField(primary_key=True, type_id=options.type_id, layout=options.layout)
            # Django orders the columns of a table by creation_counter. Make the id the first one.
            pk.creation_counter = -1
            attrs |= {
                "_object": options,
                "id": pk,
                "ShardMeta": type(
                    "ShardMeta",
                    (),
                    {"group": options.group, "shard_key": "id", "cache": options.cache},
                ),
            }
        cls = super().__new__(mcs, name, bases, attrs, **kwargs)
        if not cls._meta.abstract:
            _refuse_columns(name, cls)
        return cls


def _refuse_columns(name: str, cls: Any) -> None:
    """Raise an error if the class declares an ordinary column.

    An ordinary column is one that ShardedObject does not have. edit() reads the locked row again,
    but only the columns of ShardedObject, and then saves all columns. So it would overwrite an
    ordinary column with an old value.
    """
    if own := sorted({field.name for field in cls._meta.concrete_fields} - _COLUMNS):
        raise InvalidObjectType(
            f"{name} has columns for {own!r}, but the values of an object are in its body. Use the fields"
            " of sharded_orm.contrib.objects.fields, or a table of their own."
        )


def _refuse_ambiguous_names(
    name: str, bases: tuple[type, ...], attrs: dict[str, Any], options: ObjectOptions
) -> None:
    """Raise an error if two fields use the same name in the body, the JSON with the fields.

    For example, a field is named ``title``, and another has ``was="title"``, its former name. A
    save would drop one of the two values.
    """
    own = {field.name: field for base in bases for field in _private_fields(base)} | attrs
    fields = {key: field for key, field in own.items() if isinstance(field, BodyField)}
    former = [*options.removed, *(each for field in fields.values() for each in field.was)]
    if twice := sorted(each for each, count in Counter([*fields, *former]).items() if count > 1):
        raise InvalidObjectType(
            f"{name} has {twice!r} more than once among the names of its fields, their 'was' and"
            " ObjectMeta.removed. Leave each name in one place."
        )


def _private_fields(base: Any) -> Any:
    return base._meta.private_fields if hasattr(base, "_meta") else ()


def _options(name: str, bases: tuple[type, ...], attrs: dict[str, Any]) -> ObjectOptions:
    meta = declared("ObjectMeta", bases, attrs)
    known = ObjectOptions.__dataclass_fields__
    values = read_meta(f"{name}.ObjectMeta", meta, known, ("group", "type_id"))
    values["removed"] = names_of(f"{name}.ObjectMeta.removed", values.get("removed", ()))
    largest = values.get("max_body", MAX_BODY)
    if type(largest) is not int or largest < 2:
        raise InvalidObjectType(
            f"{name}.ObjectMeta.max_body is {largest!r}. Give a number of bytes, at least 2."
        )
    return ObjectOptions(**values)


class ShardedObject(ShardedModel, metaclass=ObjectBase):
    """An object whose fields are kept in JSON, on the shard that its id names (Pinterest, P5, P6).

    ::

        class Board(ShardedObject):
            name = fields.Text()

            class ObjectMeta:
                group = "pins"
                type_id = 2

        board = Board.objects.create(name="Cats")
        pin = Pin.objects.create(near=board, board=board)

    It is a :class:`ShardedModel` with the columns ``id``, ``data``, ``ts`` (the time of the last
    change), ``version`` and ``active``. ``save()`` raises :exc:`ConcurrentEdit` if somebody else
    has changed the object since it was read. ``delete()`` sets ``active`` to False.
    """

    _object: ClassVar[ObjectOptions]

    data: Any = BodyColumn(default=dict, editable=False)
    ts: models.DateTimeField[Any, Any] = models.DateTimeField(auto_now=True, editable=False)
    version: Any = VersionColumn(default=1, editable=False)
    active: models.BooleanField[Any, Any] = models.BooleanField(default=True, editable=False)

    objects = ObjectManager()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self._meta.verbose_name} {self.pk}"

    @classmethod
    def body_fields(cls) -> list[Any]:
        """Return the fields that are kept in the body (the column ``data`` with JSON).

        They are in the order of their declaration.
        """
        own = [field for field in cls._meta.private_fields if isinstance(field, BodyField)]
        return sorted(own, key=lambda field: field.creation_counter)

    def to_dict(self) -> dict[str, Any]:
        """Return the id and the values of all fields as a dict that can be written as JSON.

        For example, a date is a text, and a reference to another object is an id. No query is sent.

        :raises DamagedObject: the body, or a value in it, cannot be read.
        """
        values = {
            field.name: field.to_json(getattr(self, field.attname)) for field in self.body_fields()
        }
        # Copy lists and dicts, so that a change of the result does not change the object.
        return {"id": self.pk, **copy.deepcopy(values)}

    def __getstate__(self) -> dict[str, Any]:
        # Overrides Model.__getstate__(), which copy.copy() calls. The copy gets its own body (the
        # dict with the values of the fields). Otherwise an assignment to a field of the copy would
        # also change the original.
        state: dict[str, Any] = super().__getstate__()
        own = ("data", "_assigned", "_seen")
        return state | {name: copy.deepcopy(state[name]) for name in own if name in state}

    # -- Writing --------------------------------------------------------------------------

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Store the object. One INSERT or one UPDATE.

        If the object was read before, it is stored only if nobody else has changed it since.

        :raises ConcurrentEdit: somebody else has changed or purged the object since it was read.
        :raises InvalidValue: a value is missing, or a validator of its field refuses it.
        :raises BodyTooLarge: the body is larger than ``ObjectMeta.max_body``.
        """
        kwargs.update(zip(_SAVE, args, strict=False))
        names = kwargs.get("update_fields")
        if names is not None:
            if not (names := set(names)):
                return  # as Django does
            own = {name for field in self.body_fields() for name in (field.name, field.attname)}
            kwargs["update_fields"] = (names - own) | {"data", "ts", "version"}
        # Prepare the body (the JSON with the fields) before Django begins a transaction, because
        # this may raise an error. An error inside the transaction would make an outer transaction
        # of the program unusable.
        prepare_body(self, self._state.adding)
        if not self._state.adding and "ts" in self.__dict__:
            # Remember the time that was read, to compare it in the UPDATE. Model.save() replaces
            # self.ts by the present time, even if the UPDATE fails.
            self.__dict__.setdefault("_stored_ts", self.ts)
        # A receiver of pre_save may call save() of the same object. This inner save() stores a new
        # time, and leaves it in _stored_ts, because the UPDATE of the outer save() must compare the
        # row with this time.
        is_inner = "_prepared" in self.__dict__
        self.__dict__["_prepared"] = True
        try:
            super().save(**kwargs)
        finally:
            self.__dict__.pop("_prepared", None)
        if not is_inner:
            self.__dict__.pop("_stored_ts", None)
        values_were_saved(self)

    save.alters_data = True  # type: ignore[attr-defined]  # as in Model

    def _do_update(
        self,
        base_qs: Any,
        using: str | None,
        pk_val: Any,
        values: Any,
        *rest: Any,
    ) -> Any:
        # Overrides Model._do_update(). The UPDATE changes the row only if the row still has the
        # version that this instance has read (Pinterest, P6), and the time of the last change. The
        # version alone is not enough. For example, save() stores version 5 and is rolled back, but
        # the instance keeps the 5. If somebody else then stores another change as version 5, the
        # next save() of this instance would overwrite it.
        stored = next((value for field, _, value in values if field.attname == "version"), None)
        if "version" in self.get_deferred_fields():
            raise self._read_partly()
        if stored != self.version + 1:
            # save() would store the version of this instance plus 1. This is another version. So
            # the caller is loaddata, which stores the row exactly as the fixture has it.
            return super()._do_update(base_qs, using, pk_val, values, *rest)
        if self._state.adding:
            # The object is new and has an id already. Send no UPDATE, because it might overwrite a
            # stored object. Return that no row was updated, so that Django inserts the object.
            return update_result(False)
        if "_stored_ts" not in self.__dict__:
            raise self._read_partly()
        unchanged = base_qs.filter(version=self.version, ts=self.__dict__["_stored_ts"])
        updated = super()._do_update(unchanged, using, pk_val, values, *rest)
        if not updated:
            raise ConcurrentEdit(
                f"{describe(self)} on {using!r} has been changed or purged since version"
                f" {self.version!r} was read, so nothing was saved. Read it again, or change it inside of"
                " 'with object.edit()', which locks it."
            )
        self.version = stored
        self.__dict__["_stored_ts"] = self.ts
        return updated

    def _read_partly(self) -> ConcurrentEdit:
        return ConcurrentEdit(
            f"{describe(self)} was read without its version or its time 'ts', so nobody knows whether it"
            " has changed since. Read it without only() and defer()."
        )

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Read the object again, as ``refresh_from_db()`` of Django does.

        The body, version and time are always read together. With a new version and an old body,
        ``save()`` would overwrite what somebody else has stored.

        :raises UnsavedChanges: reading a deferred field would discard changes that were not saved.
        """
        if fields is not None:
            own = {name for field in self.body_fields() for name in (field.name, field.attname)}
            together = own | {"data", "ts", "version"}
            if not together.isdisjoint(fields):
                fields = list({*fields, "data", "ts", "version"} - own)
                self._refuse_unsaved("loading a deferred field")
        super().refresh_from_db(using=using, fields=fields, from_queryset=from_queryset)
        self.__dict__.pop("_referred", None)
        if fields is None or "data" in fields:
            self.__dict__.pop("_stored_ts", None)
            values_were_read(self)

    def _refuse_unsaved(self, action: str) -> None:
        changed = [field.name for field in self.body_fields() if field.is_changed(self)]
        if changed:
            raise UnsavedChanges(
                f"{describe(self)} has unsaved values of {sorted(changed)!r}, which {action} would replace"
                " by the stored ones. Inside of edit(), assign them in the block; else save() first."
            )

    @contextmanager
    def edit(self) -> Iterator[Self]:
        """Lock the object, let the ``with`` block change it, and save it (Pinterest, P6).

        ::

            with pin.edit():
                pin.note = "…"

        At the start of the block, the instance gets the stored values. If the block raises an
        error, nothing is saved, and the instance gets the stored values back. The block is a
        transaction on the object's shard. Costs two statements, besides BEGIN and COMMIT.

        :raises DoesNotExist: the object has been deleted or purged.
        :raises UnsavedChanges: the instance is new, or has changes that were not saved.
        """
        if self._state.adding:
            raise UnsavedChanges(f"{describe(self)} was not stored yet. save() it first.")
        self._refuse_unsaved("edit()")
        with sharded_orm.atomic(self):
            row = self._locked()
            self._take_over(row)
            try:
                yield self
                if not self._was_purged(row):
                    self.save()
            except BaseException:
                self.pk = row.pk
                self._take_over(row)
                raise

    def full_clean(self, *args: Any, **kwargs: Any) -> None:
        """Check the fields as ``full_clean()`` of Django does, and the size of the body.

        Forms call this method. So a form shows an error if the body is too large.

        :raises ValidationError: a value is refused, or the body cannot be stored.
        """
        super().full_clean(*args, **kwargs)
        try:
            check_body(self)
        except BodyTooLarge as exc:
            raise ValidationError(
                _("This is too large to be stored: the limit is %(limit)s bytes in all."),
                code="body_too_large",
                params={"limit": self._object.max_body},
            ) from exc

    def _locked(self) -> Any:
        alias = str(self._state.db)
        rows = self._all_rows().using(alias).filter(pk=self.pk)
        if not connections[alias].features.has_select_for_update:
            # SQLite does not lock rows that are read. If a transaction begins with a read and
            # another one writes then, the first can no longer write. So begin with a write.
            rows.take_write_lock()
        if self.__dict__.get("active", True):
            # Usually a deleted object cannot be edited. But if the instance was read as a deleted
            # one, find its row, so that the block of edit() can undelete it.
            rows = rows.filter(active=True)
        return rows.select_for_update().get()

    def _was_purged(self, row: Any) -> bool:
        """Return whether the block of edit() has deleted ``row``, the locked row. purge() sets the id
        of the instance to None, as delete() of Django does.
        """
        rows = self._all_rows().using(row._state.db)
        return self.pk is None and not rows.filter(pk=row.pk).exists()

    def _all_rows(self) -> Any:
        return type(self).objects.without_conditions().with_deleted()

    def _take_over(self, row: Any) -> None:
        names = ("data", "ts", "version", "active")
        self.__dict__.update({name: copy.deepcopy(row.__dict__[name]) for name in names})
        self.__dict__.pop("_stored_ts", None)
        values_were_read(self)

    def delete(  # type: ignore[override]  # takes no arguments of other base classes
        self, using: Any = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Set ``active`` to False. From then on, only ``with_deleted()`` finds the object.

        To undo this, set ``active`` to True in ``edit()``. If other objects have this object in a
        mapping, its entries stay, but pages leave the object out. Costs one UPDATE, and one SELECT
        of the new state. To delete the row itself, see :meth:`purge`.

        :raises UnstoredObject: the object has no id, because it was never saved.
        """
        self._refuse_unstored("delete")
        rows = self._all_rows().filter(pk=self.pk, active=True)
        deleted: tuple[int, dict[str, int]] = rows.delete()
        if deleted[0]:
            self.refresh_from_db()
        return deleted

    delete.alters_data = True  # type: ignore[attr-defined]  # as in Model

    def purge(self) -> tuple[int, dict[str, int]]:
        """Delete the row from its shard for good. One DELETE.

        :raises UnstoredObject: the object has no id, because it was never saved.
        """
        self._refuse_unstored("purge")
        return super().delete()

    purge.alters_data = True  # type: ignore[attr-defined]  # as in Model

    def _refuse_unstored(self, action: str) -> None:
        if self.pk is None:
            raise UnstoredObject(
                f"{action}() of {describe(self)}: it was never stored, so there is nothing to delete. save() it"
                " first, or drop the instance."
            )
