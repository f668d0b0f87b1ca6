"""Tables that find an object by an external value such as a Facebook id: :class:`ObjectLookup`.

The design is Pinterest's: row P11 of docs/explanation/designs.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, router, transaction

from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from sharded_orm.contrib.objects.exceptions import InvalidObjectType, InvalidValue
from sharded_orm.contrib.objects.mapping_manager import clean_with_ids, id_of
from sharded_orm.contrib.objects.object_queryset import Batch
from sharded_orm.contrib.objects.options import declared, read_meta, refuse_concrete_base
from sharded_orm.models import ExactCharField, ShardedManager
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.relations.model_class import ShardedModelBase

_Manager: Any = ShardedManager


class ObjectLookupManager(_Manager):  # type: ignore[misc]  # the base class is Any for mypy
    """The manager of a lookup table. Its rows map values, such as Facebook ids, to objects."""

    def find(self, value: str) -> Any:
        """Return the object to which ``value`` leads.

        Costs one query on the shard of the value, and one query for the object.

        :raises DoesNotExist: the value leads to no object, or the object was deleted.
        """
        try:
            self._check(value)
            row = self.get(pk=value)
        except (self.model.DoesNotExist, InvalidValue) as exc:
            target = self.model.target
            raise target.DoesNotExist(
                f"{target._meta.object_name} matching query does not exist."
            ) from exc
        return self._objects().get(row.target_id)

    def find_many(self, values: Iterable[str]) -> Batch:
        """Return a dict that maps ``values`` to the objects to which they lead.

        Values that lead to no object are left out. If the body of an object is damaged, its value
        is left out as well, and the attribute ``damaged`` of the dict maps the value to the error.
        Costs two round trips per node (database server).
        """
        rows = self.in_bulk([value for value in values if self._is_valid(value)])
        objects = self._objects().get_many(row.target_id for row in rows.values())
        batch = Batch()
        for value, row in rows.items():
            for found, wanted in ((objects, batch), (objects.damaged, batch.damaged)):
                if row.target_id in found:
                    wanted[value] = found[row.target_id]
        return batch

    def claim(self, value: str, target: Any) -> None:
        """Store that ``value`` leads to the object ``target``. One INSERT.

        :raises LookupValueTaken: the value leads to another object.
        :raises InvalidValue: the value is too long, or is not a text that every database can store.
        """
        self._check(value)
        pk = id_of(self.model.target, target)
        if self._claimed(value, pk) != pk:
            raise LookupValueTaken(
                f"{value!r} is taken: {self.model.__name__} leads to another {self.model.target.__name__}"
                " by it. Release it there first, or take another value."
            )

    def release(self, value: str, target: Any) -> bool:
        """Remove ``value`` if it leads to ``target``, so that another object can claim it. Two statements.

        :returns: whether the value led to ``target``.
        """
        pk = id_of(self.model.target, target)
        if not self._is_valid(value):
            return False
        rows = self.filter(pk=value, target_id=pk)
        with transaction.atomic(using=rows.db):
            # The UPDATE changes nothing, but locks the row. The lock is needed if signals have
            # receivers. Then delete() first reads the row, and afterwards deletes it by its primary
            # key, which is the value. In between, another process could give the value to another
            # object, and delete() would delete the row of that object.
            return bool(rows.update(target_id=pk) and rows.delete()[0])

    def find_or_create(self, value: str, **fields: Any) -> tuple[Any, bool]:
        """Return the object to which a value leads. If there is none, create it with ``fields``.

        If several processes call this at once, all get the same object. If the object was deleted,
        a new one is created, and the value leads to the new one. The object is stored first, and
        then the row that maps the value to it. If the process dies in between, the object stays,
        and no value leads to it.

        :returns: the object, and whether it was created.
        :raises DamagedObject: the object exists, and its body cannot be read.
        :raises InvalidValue: the value is too long, or is not a text that every database can store.
        """
        self._check(value)
        objects = self._objects()
        row = self.filter(pk=value).first()
        if row is not None:
            batch = objects.get_many([row.target_id])
            if row.target_id in batch.damaged:
                raise batch.damaged[row.target_id]
            if batch:
                return batch[row.target_id], False
        new = objects.create(**fields)
        former = None if row is None else row.target_id
        pk = self._claimed(value, new.pk, former)
        if pk == new.pk:
            return new, True
        new.purge()
        try:
            return objects.get(pk), False
        except self.model.target.DoesNotExist:
            # The object of the faster process has been deleted since, so begin again.
            return self.find_or_create(value, **fields)

    def _objects(self) -> Any:
        # If a condition of the project hid an object, find_or_create() would give its value away.
        return self.model.target.objects.without_conditions()

    def _is_valid(self, value: Any) -> bool:
        try:
            self._check(value)
        except InvalidValue:
            return False
        return True

    def _check(self, value: Any) -> None:
        field = self.model._meta.get_field("value")
        try:
            text = field.to_python(value)
            field.run_validators(text)
            if text is None or "\0" in text:
                raise ValueError("None and NUL are no text")
            text.encode()
        except (ValidationError, ValueError) as exc:
            raise InvalidValue(
                f"{value!r} cannot lead to an object in {self.model.__name__}: {exc}. Give a text of at"
                f" most {field.max_length!r} characters, without NUL and lone surrogates."
            ) from exc

    def _claimed(self, value: str, pk: int, former: int | None = None) -> int:
        """Let ``value`` lead to the id ``pk``, if it leads to no id yet or to ``former``.

        :returns: the id to which the value leads afterwards. It is not ``pk`` if another process
            was faster.
        """
        if former is not None and self.filter(pk=value, target_id=former).update(target_id=pk):
            return pk
        row = self.model(value=value, target_id=pk)
        try:
            self._insert(row)
        except IntegrityError:
            stored = self.filter(pk=value).uncached().first()
            if stored is not None:
                return int(stored.target_id)
            # The value was taken, and has been released since.
            self._insert(row)
        return pk

    def _insert(self, row: Any) -> None:
        with transaction.atomic(using=router.db_for_write(self.model, instance=row)):
            row.save(force_insert=True)


class ObjectLookupBase(ShardedModelBase):
    """The metaclass of lookup tables. Makes ``ShardMeta`` from ``class LookupMeta``."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any
    ) -> Any:
        meta = attrs.get("Meta")
        if not getattr(meta, "abstract", False) and not getattr(meta, "proxy", False):
            refuse_concrete_base(name, bases)
            if not hasattr(declared("target", bases, attrs), "_object"):
                raise InvalidObjectType(
                    f"{name}.target must be a class of objects that is not abstract."
                )
            meta = declared("LookupMeta", bases, attrs)
            values = read_meta(f"{name}.LookupMeta", meta, ("cache", "group"), ("group",))
            attrs["ShardMeta"] = type("ShardMeta", (), {"shard_key": "value", **values})
        return super().__new__(mcs, name, bases, attrs, **kwargs)


class ObjectLookup(ShardedModel, metaclass=ObjectLookupBase):
    """A lookup table, which finds an object by an external value such as a Facebook id (Pinterest,
    P11).

    ::

        class FacebookUsers(ObjectLookup):
            target = User

            class LookupMeta:
                group = "lookups"

        user, created = FacebookUsers.objects.find_or_create("4711", name="Ada")
        FacebookUsers.objects.find("4711")

    The strategy of the group is ``"modulo"``: the shard of a value is its md5 modulo the number of
    shards. With another number of shards, values would belong on other shards, so no shard can be
    added later. A value is text. It is compared exactly: ``Ada`` and ``ada`` are two values.
    """

    target: ClassVar[Any]

    value: models.CharField[Any, Any] = ExactCharField(max_length=255, primary_key=True)
    target_id: models.BigIntegerField[Any, Any] = models.BigIntegerField()

    objects = ObjectLookupManager()

    class Meta:
        abstract = True

    def clean_fields(self, exclude: Any = None) -> None:
        """Raise ``ValidationError`` also for the id of another type, so that forms show the error."""
        clean_with_ids(super().clean_fields, self, [("target_id", self.target)], exclude)
