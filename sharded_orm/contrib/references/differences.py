"""Compares copies on a shard with the rows of reference tables in the global database.

Also writes the copies that differ.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from django.db import DEFAULT_DB_ALIAS, IntegrityError, connections, transaction
from django.db.models import BooleanField, ExpressionWrapper, JSONField, Q, QuerySet, Value

from sharded_orm.contrib.mirrors.source_reads import JSON_NULL, is_same
from sharded_orm.contrib.references.declaration import copied_fields
from sharded_orm.contrib.references.versions import BATCH, insert_rows

_writing: ContextVar[bool] = ContextVar("sharded_orm_writing_copies", default=False)

is_writing_copies = _writing.get


@contextmanager
def writing_copies() -> Iterator[None]:
    """In the ``with`` block, the ORM may write copies of reference tables. Elsewhere it refuses to."""
    token = _writing.set(True)
    try:
        yield
    finally:
        _writing.reset(token)


@dataclass
class CopyDifference:
    """The differences between the rows of ``model`` in the global database and their copies on a
    shard.

    :param missing: values of rows that the shard lacks, in the order of the copied fields.
    :param stale: values of rows in the global database whose copies on the shard have different
        values.
    :param orphaned: primary keys of copies whose row is not in the global database.
    :param compared: number of rows that were compared.
    """

    model: Any
    compared: int = 0
    missing: list[tuple[Any, ...]] = field(default_factory=list)
    stale: list[tuple[Any, ...]] = field(default_factory=list)
    orphaned: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.missing) + len(self.stale) + len(self.orphaned)

    def pk_of(self, row: tuple[Any, ...]) -> Any:
        """Return the primary key of a row, which is given as a tuple of values."""
        return row[copied_fields(self.model).index(self.model._meta.pk)]

    @property
    def pks(self) -> list[Any]:
        """The primary keys of the rows that differ, without repetition."""
        return [*map(self.pk_of, self.missing), *map(self.pk_of, self.stale), *self.orphaned]

    def drop(self, pks: Container[Any]) -> int:
        """Remove the rows with these primary keys from the differences. Return the number of rows
        removed.
        """
        before = len(self)
        self.missing = [row for row in self.missing if self.pk_of(row) not in pks]
        self.stale = [row for row in self.stale if self.pk_of(row) not in pks]
        self.orphaned = [pk for pk in self.orphaned if pk not in pks]
        return before - len(self)


def compare_rows(
    model: Any,
    alias: str,
    pks: Sequence[Any] | None = None,
    *,
    newest_first: bool = False,
    sample: float | None = None,
) -> CopyDifference:
    """Compare the copies on the shard ``alias`` with the rows in the global database.

    Costs two queries per 500 rows. If all rows are compared, costs three queries per 500 rows, and
    two more per 500 copies.

    :param pks: the primary keys of the rows to compare; None for all rows.
    :param newest_first: whether to begin with the highest primary keys, if all rows are compared.
    :param sample: the part of the rows and copies to compare, in chunks of 500, such as 0.1 for
        about a tenth; None for all.
    """
    found = CopyDifference(model)
    if pks is not None:
        for start in range(0, len(pks), BATCH):
            page = list(pks[start : start + BATCH])
            _compare(found, alias, page, _rows(model, DEFAULT_DB_ALIAS, page))
        return found
    for page in _pages(model, DEFAULT_DB_ALIAS, newest_first, sample):
        _compare(found, alias, page, _rows(model, DEFAULT_DB_ALIAS, page))
    for page in _pages(model, alias, newest_first, sample):
        known = _rows(model, DEFAULT_DB_ALIAS, page)
        found.orphaned += [pk for pk in page if pk not in known]
    return found


def _compare(found: CopyDifference, alias: str, pks: list[Any], rows: dict[Any, Any]) -> None:
    copies = _rows(found.model, alias, pks)
    json_positions = _json_positions(copied_fields(found.model))
    found.compared += len(pks)
    for pk in pks:
        row, copy = rows.get(pk), copies.get(pk)
        if row is None:
            if copy is not None:
                found.orphaned.append(pk)
        elif copy is None:
            found.missing.append(row)
        elif not is_same(row, copy, json_positions):
            found.stale.append(row)


def _rows(model: Any, alias: str, pks: list[Any]) -> dict[Any, tuple[Any, ...]]:
    rows: QuerySet[Any] = QuerySet(model, using=alias).order_by().filter(pk__in=pks)
    fields = copied_fields(model)
    names = [each.attname for each in fields]
    position = names.index(model._meta.pk.attname)
    json = _json_positions(fields)
    if not json:
        return {row[position]: tuple(row) for row in rows.values_list(*names)}
    are_null = [
        ExpressionWrapper(Q(**{f"{names[index]}__isnull": True}), BooleanField())
        if fields[index].null
        else Value(False)
        for index in json
    ]
    found = {}
    for row in rows.values_list(*names, *are_null):
        values = list(row[: len(names)])
        for index, is_null in zip(json, row[len(names) :], strict=True):
            if values[index] is None and not is_null:
                values[index] = JSON_NULL
        found[row[position]] = tuple(values)
    return found


def _json_positions(fields: Sequence[Any]) -> list[int]:
    return [index for index, each in enumerate(fields) if isinstance(each, JSONField)]


def _pages(model: Any, alias: str, newest_first: bool, sample: float | None) -> Iterator[list[Any]]:
    """Yield lists of 500 primary keys of the table on ``alias``.

    :param sample: the part of the lists to yield, chosen at random, such as 0.1; None for all.
    """
    rows: QuerySet[Any] = QuerySet(model, using=alias).order_by("-pk" if newest_first else "pk")
    page = list(rows.values_list("pk", flat=True)[:BATCH])
    while page:
        if sample is None or random.random() < sample:
            yield page
        behind = {"pk__lt" if newest_first else "pk__gt": page[-1]}
        page = list(rows.filter(**behind).values_list("pk", flat=True)[:BATCH])


def apply(found: Sequence[CopyDifference], alias: str) -> None:
    """Make the copies on the shard ``alias`` equal to the rows in the global database.

    Must be called in an open transaction of the shard.

    :param found: the differences, in the order of :func:`~.declaration.reference_models`.
    :raises django.db.IntegrityError: rows of the shard refer to a copy whose row is not in the
        global database. SQLite and PostgreSQL raise the error at the commit.
    """
    found = [each for each in found if len(each)]
    if not found:
        return
    with writing_copies():
        try:
            with transaction.atomic(using=alias):
                _delete_orphans(found, alias)
                _write(found, alias, replace=False)
        except IntegrityError:
            # The shard has refused the statements. For example, two rows have swapped unique
            # values, or a changed copy still refers to a copy that is to be deleted. So try another
            # order: delete the changed copies and insert them again with the new values, and only
            # then delete the copies whose rows are gone.
            with transaction.atomic(using=alias):
                _write(found, alias, replace=True)
                _delete_orphans(found, alias)


def _delete_orphans(found: Sequence[CopyDifference], alias: str) -> None:
    for each in reversed(found):
        delete_copies(each.model, alias, each.orphaned)


def copies_of(model: Any, alias: str, pks: Sequence[Any]) -> dict[Any, tuple[Any, ...]]:
    """Return a dict that maps each of ``pks`` to the values of its copy on a shard.

    A primary key that has no copy there is left out.
    """
    found: dict[Any, tuple[Any, ...]] = {}
    for start in range(0, len(pks), BATCH):
        found |= _rows(model, alias, list(pks[start : start + BATCH]))
    return found


def delete_copies(model: Any, alias: str, pks: Sequence[Any]) -> None:
    """Delete copies on a shard. The database raises an error if other rows refer to a copy."""
    own = [f.attname for f in copied_fields(model) if f.null and f.related_model is model]
    for start in range(0, len(pks), BATCH):
        doomed: Any = QuerySet(model, using=alias).filter(pk__in=pks[start : start + BATCH])
        if own:
            # First set foreign keys from copies to copies of the same table to NULL, because some
            # databases check foreign keys after each deleted row.
            doomed.update(**dict.fromkeys(own))
        doomed._raw_delete(alias)


def restore_copies(model: Any, alias: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert the copies ``rows`` on the shard ``alias``, without a check of foreign keys.

    :param rows: the values of each copy, as :func:`copies_of` returns them.
    """
    with writing_copies(), connections[alias].constraint_checks_disabled():
        _insert(model, alias, rows)


def _insert(model: Any, alias: str, rows: Sequence[tuple[Any, ...]]) -> None:
    fields = copied_fields(model)
    objs = [
        model(**{f.attname: value for f, value in zip(fields, row, strict=True)}) for row in rows
    ]
    if objs:
        insert_rows(model, alias, objs, fields)


def _write(found: Sequence[CopyDifference], alias: str, *, replace: bool) -> None:
    # Foreign keys are not checked, so the copies may be written in any order. This is safe: the
    # global database has checked foreign keys between reference tables. Rows of the shard that
    # refer to a copy keep their copy, because each copy that is deleted here is inserted again.
    with connections[alias].constraint_checks_disabled():
        for each in found:
            if replace:
                delete_copies(each.model, alias, [each.pk_of(row) for row in each.stale])
            else:
                _update(each, alias)
        for each in found:
            _insert(each.model, alias, [*each.missing, *(each.stale if replace else ())])


def _update(found: CopyDifference, alias: str) -> None:
    fields = copied_fields(found.model)
    for row in found.stale:
        values = {
            f.attname: value for f, value in zip(fields, row, strict=True) if not f.primary_key
        }
        QuerySet(found.model, using=alias).filter(pk=found.pk_of(row)).update(**values)
