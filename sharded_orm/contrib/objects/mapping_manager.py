"""The manager of mappings. A mapping is a table that says which objects belong to an object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from sharded_orm import runtime
from sharded_orm.contrib.objects.exceptions import (
    DamagedObject,
    InvalidPageSize,
    InvalidValue,
    ObjectWriteRefused,
    WrongObjectType,
)
from sharded_orm.contrib.objects.page import Cursor, Page
from sharded_orm.models import ShardedManager, ShardedQuerySet
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.type_variables import M

# The largest number of entries that one query reads.
_MOST = 1000


class MappingQuerySet(ShardedQuerySet[M]):
    """The queryset of mappings, whose rows are called entries.

    It computes the primary key of each new entry, and checks the ids and positions that are stored.
    """

    def update(self, **kwargs: Any) -> int:
        if not {"id", "pk", "source_id", "target_id"}.isdisjoint(kwargs):
            raise sides_changed(self.model)
        if "sequence" in kwargs:
            _check_sequence(self.model, kwargs["sequence"])
        return super().update(**kwargs)

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        entries: list[Any] = list(objs)
        for entry in entries:
            check_entry(entry)
            entry.id = entry_id(entry.source_id, entry.target_id)
        return super().bulk_create(entries, *args, **kwargs)


_Manager: Any = ShardedManager.from_queryset(MappingQuerySet)  # type: ignore[attr-defined]  # the type of ShardedManager hides that it is a class


class MappingManager(_Manager):  # type: ignore[misc]  # the base class is Any for mypy
    """The manager of mappings. Its methods take objects or their ids."""

    def add(self, source: Any, target: Any, sequence: int | None = None) -> bool:
        """Add the object ``target`` to the objects that belong to ``source``.

        Costs two statements on the shard of the source.

        :param source: an object or its id.
        :param target: an object or its id.
        :param sequence: the position of ``target``; by default the time in microseconds since 1970.
            If ``target`` was added before, it keeps its position.
        :returns: whether ``target`` was added now.
        :raises WrongObjectType: an id or object is of another type than the mapping declares.
        :raises InvalidValue: the position has more than 64 bits.
        """
        sides, entry = self.model._sides, self._key(source, target)
        if sequence is None:
            sequence = time.time_ns() // 1000
        values = {sides.far_column: id_of(sides.far_class, target), "sequence": sequence}
        _, created = self.uncached().get_or_create(defaults=values, **entry)
        return bool(created)

    def remove(self, source: Any, target: Any) -> bool:
        """Remove ``target`` from the objects that belong to ``source``. Return whether it was one
        of them. One statement.
        """
        return bool(self._entry(source, target).delete()[0])

    def move(self, source: Any, target: Any, sequence: int) -> bool:
        """Give ``target`` another position among the objects that belong to ``source``. One
        statement.

        :returns: whether ``target`` belongs to ``source``.
        """
        return bool(self._entry(source, target).update(sequence=sequence))

    def contains(self, source: Any, target: Any) -> bool:
        """Return whether ``target`` belongs to ``source``. One statement."""
        return bool(self._entry(source, target).exists())

    def count(self, source: Any) -> int:
        """Return the number of objects that belong to ``source``. One statement.

        Deleted objects are counted as well.
        """
        return int(self._entries(source).count())

    def page(
        self,
        source: Any,
        *,
        after: Cursor | str | None = None,
        size: int = 50,
        newest_first: bool = False,
    ) -> Page:
        """Return one page of the objects that belong to ``source``, in the order of their
        positions.

        First the entries are read on the shard of the source. Then their objects are read, in one
        round trip per node (database server). Deleted objects are left out. If the page has too few
        objects then, more entries and their objects are read, until the page is full.

        :param after: the cursor ``next`` of the previous page, or its text; None for the first
            page.
        :param size: the number of objects, at most 999.
        :param newest_first: whether to begin at the highest position.
        :raises InvalidCursor: ``after`` is no cursor.
        :raises InvalidPageSize: ``size`` is too small or too large, or no integer.
        """
        if not (type(size) is int and 0 < size < _MOST):
            raise InvalidPageSize(f"size={size!r} is not 1 to {_MOST - 1!r}.")
        cursor = after if after is None or isinstance(after, Cursor) else Cursor.parse(after)
        sides = self.model._sides
        near = id_of(sides.near_class, source)
        read: list[tuple[int, int]] = []
        # Maps ids to objects. If another process moves an entry between two reads, both reads may
        # find its object. A dict has each id once, at its first place, so a page has no object
        # twice.
        rows: dict[int, Any] = {}
        damaged: dict[int, DamagedObject] = {}
        wanted = chunk = size + 1
        while wanted > 0:
            entries = self._positions(near, cursor, newest_first, chunk)
            objects = sides.far_class.objects.get_many([target for _, target in entries])
            damaged |= objects.damaged
            if len(objects) == len(entries):
                read += entries
            else:
                read += [entry for entry in entries if entry[1] in objects]
            rows |= objects
            wanted = size + 1 - len(rows)
            if len(entries) < chunk:
                break
            cursor = Cursor(*entries[-1])
            chunk = min(_MOST, 2 * chunk)
        shown = list(rows.values())[:size]
        last = None
        if len(rows) > size:
            end = shown[-1].pk
            last = Cursor(*next(entry for entry in read if entry[1] == end))
        return Page(shown, last, damaged)

    def _positions(
        self, near: int, cursor: Cursor | None, newest_first: bool, count: int
    ) -> list[tuple[int, int]]:
        """Return pairs (sequence, object id) of the first ``count`` entries after ``cursor``.

        The cache stores only flat lists of numbers. So the numbers of the pairs are stored one
        after the other, and made into pairs again after each read.
        """
        column = self.model._sides.far_column

        def query_database() -> list[int]:
            entries = self._after(near, cursor, newest_first).values_list("sequence", column)
            return list(chain.from_iterable(entries[:count]))

        text = f"entries after {cursor}, {count}, {newest_first}"
        numbers = iter(self.get_queryset().numbers_of_key(near, text, query_database))
        return list(zip(numbers, numbers, strict=True))

    def _after(self, near: int, cursor: Cursor | None, newest_first: bool) -> Any:
        sides = self.model._sides
        column = sides.far_column
        entries = self.uncached().filter(**{sides.near_column: near})
        sign, reached, passed = ("-", "lte", "gte") if newest_first else ("", "gte", "lte")
        if cursor is not None:
            # Use filter() and exclude(), not a Q object. A queryset with a Q object is compiled to
            # SQL each time. One without it is compiled only the first time.
            entries = entries.filter(**{f"sequence__{reached}": cursor.sequence}).exclude(
                **{"sequence": cursor.sequence, f"{column}__{passed}": cursor.target}
            )
        return entries.order_by(f"{sign}sequence", f"{sign}{column}")

    def _entries(self, source: Any) -> Any:
        sides = self.model._sides
        return self.filter(**{sides.near_column: id_of(sides.near_class, source)})

    def _entry(self, source: Any, target: Any) -> Any:
        return self.filter(**self._key(source, target))

    def _key(self, source: Any, target: Any) -> dict[str, Any]:
        """Return arguments of filter() that find the entry that says that ``target`` belongs to
        ``source``. They are its shard key and its primary key.
        """
        sides = self.model._sides
        ids = {
            sides.near_column: id_of(sides.near_class, source),
            sides.far_column: id_of(sides.far_class, target),
        }
        pk = entry_id(ids["source_id"], ids["target_id"])
        return {sides.near_column: ids[sides.near_column], "id": pk}


def entry_id(source: int, target: int) -> UUID:
    """Return the primary key of the entry that says that ``target`` belongs to ``source``.

    It consists of the 64 bits of ``source`` and the 64 bits of ``target``. So a target has at most
    one entry for each source, and the entry can be found by its primary key. No two shards have
    entries with the same primary key.
    """
    return UUID(int=source << 64 | target)


def check_entry(entry: Any) -> None:
    """Check the two ids and the position of an entry before it is stored.

    An entry with a wrong id would make its page unreadable.

    :raises WrongObjectType: an id is of another type than the mapping declares.
    :raises InvalidValue: the position has more than 64 bits.
    """
    sides = entry._sides
    id_of(sides.near_class, getattr(entry, sides.near_column))
    id_of(sides.far_class, getattr(entry, sides.far_column))
    _check_sequence(type(entry), entry.sequence)


def _check_sequence(model: Any, sequence: Any) -> None:
    if isinstance(sequence, int) and not -(1 << 63) <= sequence < 1 << 63:
        raise InvalidValue(
            f"{sequence!r} is no position in {model.__name__}. Positions are whole numbers of 64 bits."
        )


def sides_changed(model: Any) -> ObjectWriteRefused:
    """Return the error for an attempt to change the source or target of a stored entry."""
    return ObjectWriteRefused(
        f"The source and the target of an entry of {model.__name__} never change: remove() it, and add()"
        " another one."
    )


def clean_with_ids(
    clean_fields: Callable[..., None],
    row: Any,
    classes_by_column: Iterable[tuple[str, Any]],
    exclude: Any,
) -> None:
    """Call ``clean_fields`` of ``row``, and also check columns that have ids of objects.

    :param clean_fields: the method ``clean_fields()`` of Django's model.
    :param classes_by_column: pairs (column, class of the object).
    :raises ValidationError: ``clean_fields`` has raised it, or a column has an id of another type or
        of a shard that does not exist.
    """
    errors: dict[str, list[ValidationError]] = {}
    try:
        clean_fields(exclude=exclude)
    except ValidationError as exc:
        exc.update_error_dict(errors)
    for column, cls in classes_by_column:
        value = getattr(row, column)
        if column not in errors and column not in (exclude or ()) and not _has_shard(cls, value):
            errors[column] = [
                ValidationError(
                    _("%(id)s is not the id of a %(model)s."),
                    code="invalid_choice",
                    params={"model": cls._meta.verbose_name, "id": value},
                )
            ]
    if errors:
        raise ValidationError(errors)


def _has_shard(cls: Any, value: Any) -> bool:
    try:
        return runtime.locate(cls._object.group, id_of(cls, value)) is not None
    except ValueError:
        return False


def id_of(cls: Any, value: Any) -> int:
    """Return the id of an object.

    :param cls: the class that the object must have.
    :param value: the object or its id.
    :raises WrongObjectType: the object or the id is of another type.
    """
    if hasattr(value, "_meta"):
        if not isinstance(value, cls._meta.concrete_model):
            raise WrongObjectType(
                f"{describe(value)} is no {cls.__name__}. Give an object of that class."
            )
        value = value.pk
        if value is None:
            raise WrongObjectType(f"The {cls.__name__} has no id yet. Save it first.")
    return int(cls._object.check_id(cls.__name__, value))
