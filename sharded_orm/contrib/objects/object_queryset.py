"""The queryset and manager of objects."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.models import F
from django.db.models.deletion import Collector
from django.utils import timezone

from sharded_orm.contrib.objects.body_column import body_of, prepare_body
from sharded_orm.contrib.objects.exceptions import DamagedObject, ObjectWriteRefused
from sharded_orm.contrib.objects.fields import values_were_saved
from sharded_orm.models import ShardedManager, ShardedQuerySet
from sharded_orm.models.moves.repetition import follow_shard, part_of_write
from sharded_orm.models.querysets.deletion_checks import may_be_refused, refuse_deletion
from sharded_orm.models.sharding.type_variables import M

logger = logging.getLogger("sharded_orm.objects")

# purge() reads and deletes this many rows at a time, if it has to read the rows first.
_BATCH = 1000


class Batch(dict[Any, Any]):
    """The dict that ``get_many()`` returns; it maps ids to objects.

    ``find_many()`` of a lookup table returns a ``Batch``, too, which maps values to objects.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The body of an object is the JSON with its fields. If it cannot be read, the object is
        #: missing in the dict itself, and this attribute maps the object's id (or value) to the
        #: error. The error is also logged.
        self.damaged: dict[Any, DamagedObject] = {}


class ObjectQuerySet(ShardedQuerySet[M]):
    """The queryset of objects. ``delete()`` sets ``active`` to False; ``purge()`` deletes the rows."""

    def get(self, *args: Any, **kwargs: Any) -> M:
        """Return the only row that matches. ``with_deleted().get(id)`` finds an object by its id.

        :raises WrongObjectType: the id is of another type.
        :raises InvalidID: the value is no id.
        """
        if len(args) == 1 and _is_id(args[0]) and kwargs.keys().isdisjoint(("id", "pk")):
            kwargs["pk"] = self.model._object.check_id(self.model.__name__, _as_id(args[0]))
            args = ()
        return super().get(*args, **kwargs)

    def delete(self) -> tuple[int, dict[str, int]]:
        rows: Any = self.filter(active=True)
        count = super(ObjectQuerySet, rows).update(
            active=False, version=F("version") + 1, ts=timezone.now()
        )
        return count, {self.model._meta.label: count} if count else {}

    delete.alters_data = True  # type: ignore[attr-defined]  # as in QuerySet
    delete.queryset_only = True  # type: ignore[attr-defined]  # a function type has no such attribute

    def purge(self) -> tuple[int, dict[str, int]]:
        """Delete the rows for good, shard by shard, as ``delete()`` of Django does.

        If another process undeletes an object before its row is deleted, the object is kept.
        Usually costs one DELETE per shard. If signals of deletions have receivers, or other models
        refer to the objects, the rows are first locked and read. If a row of any shard is protected
        (``PROTECT`` or ``RESTRICT``), an error is raised before anything is deleted on any shard.
        """
        is_fast = Collector(using=self._options.group, origin=self).can_fast_delete
        if self._is_deletion_refused() or is_fast(self):
            return super().delete()
        targets = self._targets(ordered=False)
        parts = [self] if targets is None else [self._for_target(target) for target in targets]
        if len(parts) > 1 and may_be_refused(self.model):
            refuse_deletion(self._options.group, parts, batch_size=_BATCH)
        counts: Counter[str] = Counter()
        for number, part in enumerate(parts):
            with part_of_write(number):
                counts += follow_shard(self._options.group, part._purge_locked)
        return counts.total(), dict(counts)

    purge.alters_data = True  # type: ignore[attr-defined]  # a function type has no such attribute
    purge.queryset_only = True  # type: ignore[attr-defined]  # a function type has no such attribute

    def _purge_locked(self) -> Counter[str]:
        # QuerySet.delete() of Django reads the rows without a lock, and then deletes them by
        # primary key. If another process undeletes an object in between, it would be deleted all
        # the same. So lock the rows first, and delete only the locked ones.
        counts: Counter[str] = Counter()
        with transaction.atomic(using=self.db):
            if not connections[self.db].features.has_select_for_update:
                self.take_write_lock()
            pks = list(self.order_by().select_for_update().values_list("pk", flat=True))
            for start in range(0, len(pks), _BATCH):
                rows = self.filter(pk__in=pks[start : start + _BATCH])
                counts.update(super(ObjectQuerySet, rows).delete()[1])
        return counts

    def take_write_lock(self) -> None:
        """Lock the rows until the end of the transaction, by an UPDATE that changes nothing.

        Use this on databases that have no SELECT FOR UPDATE, such as SQLite.
        """
        super().update(version=F("version"))

    def update(self, **kwargs: Any) -> int:
        raise ObjectWriteRefused(
            f"update() of {self.model.__name__} would neither look at bodies nor count versions. Change"
            " each object inside of 'with object.edit()'."
        )

    def bulk_update(self, *args: Any, **kwargs: Any) -> int:
        raise ObjectWriteRefused(
            f"bulk_update() of {self.model.__name__} would not compare versions. Change each object inside"
            " of 'with object.edit()'."
        )

    def bulk_create(
        self,
        objs: Iterable[M],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[M]:
        if update_conflicts:
            raise ObjectWriteRefused(
                f"bulk_create() of {self.model.__name__} with update_conflicts would not compare versions."
                " Create new objects only, and change the others inside of edit()."
            )
        rows: list[Any] = list(objs)
        # Prepare all bodies before the first statement, because this may raise an error. The
        # objects of another shard would be stored already.
        try:
            for row in rows:
                prepare_body(row, add=True)
                row.__dict__["_prepared"] = True
            rows = super().bulk_create(rows, batch_size, ignore_conflicts)
        finally:
            for row in rows:
                row.__dict__.pop("_prepared", None)
        for row in rows:
            values_were_saved(row)
        return rows


_Manager: Any = ShardedManager.from_queryset(ObjectQuerySet)  # type: ignore[attr-defined]  # the type of ShardedManager hides that it is a class


class ObjectManager(_Manager):  # type: ignore[misc]  # the base class is Any for mypy
    """The manager of objects. Deleted objects are found by ``with_deleted()`` only."""

    # Whether get_queryset() also returns deleted objects.
    _reads_deleted = False

    def get_queryset(self) -> Any:
        rows = super().get_queryset()
        return rows if self._reads_deleted else rows.filter(active=True)

    def with_deleted(self) -> Any:
        """Return a queryset of all objects, including objects that were deleted and not yet purged."""
        if type(self).get_queryset is ObjectManager.get_queryset:
            return super().get_queryset()
        # A manager of the project has a get_queryset() of its own, whose conditions hold here, too.
        manager = copy.copy(self)
        manager._reads_deleted = True
        return manager.get_queryset()

    def without_conditions(self) -> ObjectManager:
        """Return a manager that also finds the objects that a ``get_queryset()`` of the project hides.

        Its use is that of ``_base_manager`` in Django: for references to an object, and for writes
        of an instance.
        """
        if type(self).get_queryset is ObjectManager.get_queryset:
            return self
        manager = ObjectManager()
        manager.model, manager._db = self.model, self._db
        manager._queryset_class = self._queryset_class
        return manager

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return the object with an id: ``Pin.objects.get(id)``. No other condition is needed.

        Cost: one query on the shard that the id names, or one round trip to the cache.

        :raises WrongObjectType: the id is of another type.
        :raises InvalidID: the value is no id.
        :raises DoesNotExist: there is no such object, or it was deleted.
        :raises DamagedObject: the body of the object cannot be read.
        """
        if len(args) == 1 and not kwargs and _is_id(args[0]):
            value = args[0]
        elif not args and kwargs.keys() in ({"id"}, {"pk"}):
            (value,) = kwargs.values()
        else:
            return super().get(*args, **kwargs)
        pk = self.model._object.check_id(self.model.__name__, _as_id(value))
        found = self.with_deleted().get(pk=pk)
        if not found.active:
            raise self.model.DoesNotExist(
                f"{self.model._meta.object_name} matching query does not exist."
            )
        body_of(found)
        return found

    async def aget(self, *args: Any, **kwargs: Any) -> Any:
        return await sync_to_async(self.get)(*args, **kwargs)

    def get_many(self, ids: Iterable[int]) -> Batch:
        """Return a dict of the objects with these ids, in the order of the ids.

        Ids without an object and ids of deleted objects are left out. Objects with damaged bodies
        are also left out: the attribute ``damaged`` of the dict maps their ids to the errors, which
        are also logged. Costs one round trip per node (database server).

        :raises WrongObjectType: an id is of another type.
        :raises InvalidID: a value is no id.
        """
        ids = list(ids)
        if not {int}.issuperset(map(type, ids)):
            ids = [_as_id(value) for value in ids]
        wanted = list(dict.fromkeys(self.model._object.check_ids(self.model.__name__, ids)))
        rows = self.with_deleted().in_bulk(wanted)
        batch: Batch = Batch()
        for pk in wanted:
            row: Any = rows.get(pk)
            if row is None or not row.active:
                continue
            if type(row.data) is not dict:
                try:
                    body_of(row)
                except DamagedObject as exc:
                    logger.error("%s", exc)
                    batch.damaged[pk] = exc
                    continue
            batch[pk] = row
        return batch

    def purge(self, before: datetime | None = None) -> int:
        """Delete the rows of deleted objects from all shards for good, and return their number.

        :param before: purge only objects that were deleted before this time; None for all.
        """
        rows = self.with_deleted().filter(active=False)
        if before is not None:
            rows = rows.filter(ts__lt=before)
        return int(rows.scatter().purge()[0])

    purge.alters_data = True  # type: ignore[attr-defined]  # a function type has no such attribute


def _is_id(argument: Any) -> bool:
    """Return whether a positional argument of ``get()`` is an id.

    If not, it is a condition, as in Django: ``Q(…)``, or a pair such as ``("active", True)``.
    """
    return not (isinstance(argument, tuple) or getattr(argument, "conditional", False))


def _as_id(value: Any) -> Any:
    # URLs and forms pass ids as texts.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return value
