"""Checks on all shards that rows may be deleted, before the first shard deletes its rows.

A foreign key with ``PROTECT`` or ``RESTRICT`` may forbid the deletion of a row. Django's collector
checks that for the rows of one database, and raises an error before it deletes any. With several
shards, the rows of the first shards would be deleted already when a later shard raises its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from django.db.models import CASCADE, PROTECT, RESTRICT, ProtectedError, RestrictedError
from django.db.models import deletion as django_deletion
from django.db.models.deletion import Collector, get_candidate_relations_to_delete

from sharded_orm.cache.request_cache import uncached
from sharded_orm.models.moves.repetition import follow_shard
from sharded_orm.models.querysets.deletion_values import refuse_values_of_deletion
from sharded_orm.models.sharding.options import group_of


def may_be_refused(model: Any) -> bool:
    """Return whether rows of other models may prevent the deletion of rows of ``model``.

    Sends no query. True in these cases:

    - A relation that Django follows in deletions has ``on_delete=PROTECT``, ``RESTRICT``, or a
      function of the project.
    - Such a relation has ``SET()`` with a function or an instance. The instance may be of another
      shard key, and then the deletion is refused.
    - There is a generic relation to rows outside of the group.
    """
    return any(True for _ in _causes_of_refusals(model))


def _causes_of_refusals(model: Any) -> Iterator[Any]:
    """Yield the ``on_delete`` of each relation that may prevent the deletion of rows of ``model``.

    For a generic relation to rows outside of the group, yield its field.
    """
    seen, found = {model}, [model]
    while found:
        model = found.pop()
        related: list[Any] = []
        for relation in get_candidate_relations_to_delete(model._meta):
            field: Any = relation.field  # type: ignore[attr-defined]  # missing in Django's type stubs
            on_delete: Any = field.remote_field.on_delete
            if on_delete in (PROTECT, RESTRICT) or on_delete.__module__ != django_deletion.__name__:
                yield on_delete
            if on_delete is CASCADE:
                related.append(relation.related_model)
        for field in model._meta.private_fields:
            if hasattr(field, "bulk_related_objects"):
                if group_of(field.related_model) != group_of(model):
                    yield field
                related.append(field.related_model)
        found += set(related) - seen
        seen.update(related)


def refuse_deletion(group: str, parts: Iterable[Any], batch_size: int | None = None) -> None:
    """Raise an error if, on any shard, the deletion of a row of ``parts`` is forbidden.

    For example, ``PROTECT`` or ``RESTRICT`` of a foreign key forbids it. Deletes nothing.

    Cost: on each shard, the queries that a deletion sends before it deletes. A function that is the
    ``on_delete`` or the value of ``SET()`` is called here, and again by the deletion. The rows of only one
    shard are in memory at a time; with ``batch_size``, only the rows of one batch.

    :param parts: a queryset for each shard.
    :param batch_size: the number of rows in a batch, if the rows are deleted in batches. It is
        ignored if something other than ``PROTECT`` can forbid the deletion, such as ``RESTRICT``.
        The result for one row can then depend on rows of other batches.
    :raises ProtectedError: its ``protected_objects`` are those of all shards.
    :raises RestrictedError: its ``restricted_objects`` are those of all shards.
    :raises CrossShardRelation: ``SET()`` gives an instance of another shard or shard key to rows.
    """
    with uncached():
        run_collectors(
            partial(follow_shard, group, partial(_collect, rows, batch_size)) for rows in parts
        )


def _collect(rows: Any, batch_size: int | None) -> None:
    rows = prepared_for_deletion(rows)
    if batch_size is None or not all(cause is PROTECT for cause in _causes_of_refusals(rows.model)):
        collector = Collector(using=rows.db, origin=rows)
        collector.collect(rows)
        refuse_values_of_deletion(collector)
        return
    run_collectors(
        partial(Collector(using=rows.db, origin=rows).collect, batch)
        for batch in _batches(rows, batch_size)
    )


def prepared_for_deletion(rows: Any) -> Any:
    """Return a copy of the queryset ``rows`` as ``QuerySet.delete()`` gives it to its collector."""
    rows = rows._chain()
    rows._for_write = True
    rows.query.select_for_update = False
    rows.query.select_related = False
    rows.query.clear_ordering(force=True)
    return rows


def _batches(rows: Any, size: int) -> Iterator[list[Any]]:
    """Yield ``rows`` in lists of ``size`` rows, ordered by primary key. One query for each list."""
    ordered = rows.order_by("pk")
    batch = list(ordered[:size])
    while batch:
        yield batch
        batch = list(ordered.filter(pk__gt=batch[-1].pk)[:size]) if len(batch) == size else []


def run_collectors(collectors: Iterable[Callable[[], object]]) -> None:
    """Call all of ``collectors``, and then raise one error for all rows that cannot be deleted.

    :param collectors: functions that run a collector of Django, one for each shard.
    """
    protected: list[ProtectedError] = []
    restricted: list[RestrictedError] = []
    for collect in collectors:
        try:
            collect()
        except ProtectedError as error:
            protected.append(error)
        except RestrictedError as error:
            restricted.append(error)
    # If both kinds of errors were raised, raise the one for protected rows, as Django does in one
    # database.
    if protected:
        raise _merged(protected, [error.protected_objects for error in protected])
    if restricted:
        raise _merged(restricted, [error.restricted_objects for error in restricted])


def _merged(errors: list[Any], rows: list[Iterable[Any]]) -> Any:
    """Return one error that replaces the errors of several shards.

    It has the message and the rows that Django's error would have if all rows were in one database.

    :param rows: the protected or restricted rows of each error.
    """
    first = errors[0]
    if len(errors) == 1:
        return first
    # Django lists the foreign keys at the end of the message: "… keys: 'Quote.page', 'Note.page'."
    start, colon, _ = str(first.args[0]).rpartition(": ")
    messages = [str(error.args[0]) for error in errors]
    if not colon or not all(text.startswith(start + colon) for text in messages):
        return type(first)(first.args[0], _distinct(rows))
    names = [text.removeprefix(start + colon).removesuffix(".").split(", ") for text in messages]
    listed = ", ".join(dict.fromkeys(name for some in names for name in some))
    return type(first)(f"{start}{colon}{listed}.", _distinct(rows))


def _distinct(rows: Iterable[Iterable[Any]]) -> Any:
    # Return a set, as Django does, if that loses no row. Two rows on different shards with the same
    # id can be equal in Python, and a set would keep only one of them. In this case, return a list.
    distinct = {(type(row), row._state.db, row.pk): row for some in rows for row in some}
    as_set = set(distinct.values())
    return as_set if len(as_set) == len(distinct) else list(distinct.values())
