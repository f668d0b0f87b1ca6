"""What happens to rows on shards when the global row to which they refer is deleted.

A foreign key from a shard to the global database has no constraint, so only Django can delete or
protect the rows. Pass one of these functions as ``on_delete``::

    author = models.ForeignKey(Author, on_delete.CASCADE, db_constraint=False)

Every deletion by Django calls the function: ``delete()`` of a row or a queryset, and the admin,
whose confirmation page shows the rows. If the foreign key is the shard key, the function queries
only the shards of the keys of the deleted rows. Otherwise it queries all shards of the group (a
scatter).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

from django.apps import apps
from django.db.models import DO_NOTHING, ForeignKey, Model, QuerySet
from django.db.models import PROTECT as DJANGO_PROTECT
from django.db.models.deletion import Collector

from sharded_orm.cache.request_cache import uncached
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.querysets.deletion_checks import prepared_for_deletion, run_collectors
from sharded_orm.models.querysets.deletion_values import refuse_values_of_deletion
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_rows import refuse_other_key
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.models.sharding.rewritten_keys import refuse_rewritten_keys

__all__ = ["CASCADE", "LEAVE", "PROTECT", "SET_NULL"]

#: Leave the rows on shards as they are, although they then refer to a row that does not exist. The
#: command ``shards check`` finds such rows. No shard is queried.
LEAVE = DO_NOTHING


def CASCADE(
    collector: Any, field: ForeignKey[Any, Any], sub_objs: QuerySet[Any], using: str
) -> None:
    """Delete the rows on each shard first, in one transaction per shard, and then the global row.

    If the deletion of the global row fails, or the process dies before it, no row on a shard refers
    to a missing row, and the deletion can be repeated. If a row on a shard prevents the deletion,
    because it is protected or restricted, an error is raised before anything is deleted. The error
    contains such rows from all shards.

    Cost: ``delete()`` of a queryset on each shard. If rows that refer to the deleted rows must be
    deleted, too, all these rows are read twice: for the check and for the deletion.

    :raises ProtectedError: a row on a shard protects one of the rows. Also :exc:`RestrictedError`.
    :raises ScatterError: a shard did not answer; nothing was deleted.
    :raises BoundKeyMismatch: one of the rows does not have the key that ``bound()`` has set;
        nothing was deleted.
    """
    # True if the collector is NestedObjects of the admin, which shows rows and never deletes them.
    shows = hasattr(collector, "add_edge")
    if not shows:
        refuse_rewritten_keys(field.model)
    rows = _dependent_rows(field, sub_objs)

    def collect(alias: str) -> None:
        rows_there = rows.using(alias)
        # Collect all rows that would be deleted together with these rows. If one of the rows is
        # protected, the collector of delete() raises an error here, but NestedObjects does not.
        on_shard = type(collector)(using=alias, origin=collector.origin)
        with uncached():
            on_shard.collect(
                rows_there.prefetch_related(field.name) if shows else rows_there.all(),
                source=field.remote_field.model,
                source_attr=field.name,
            )
        if shows:
            _show(collector, on_shard)
        else:
            refuse_values_of_deletion(on_shard)
        rows_there.origin = collector.origin
        collector.fast_deletes.append(_ShardDeletion(collector, rows_there))

    run_collectors(partial(collect, alias) for alias in _aliases(field, rows))


def PROTECT(
    collector: Any, field: ForeignKey[Any, Any], sub_objs: QuerySet[Any], using: str
) -> None:
    """Raise :exc:`~django.db.models.ProtectedError` if rows on shards refer to the global row.

    The error has these rows as its ``protected_objects``.

    :raises ScatterError: a shard did not answer; nothing was deleted.
    """
    rows = _dependent_rows(field, sub_objs)
    with uncached():
        protected: Any = list(rows if _is_key(field) else rows.scatter())
    if protected:
        DJANGO_PROTECT(collector, field, protected, using)


def SET_NULL(
    collector: Any, field: ForeignKey[Any, Any], sub_objs: QuerySet[Any], using: str
) -> None:
    """Set the foreign key of the rows to NULL on each shard first, and then delete the global row.

    Each shard commits by itself. If the global row cannot be deleted after that, the foreign keys
    stay NULL.

    Cost: one query of all shards reads the primary keys and shard keys of all such rows into
    memory. Each shard with such rows then gets one UPDATE. If there are millions, set their foreign
    keys to NULL in pieces before you delete the global row.

    :raises ScatterError: a shard did not answer; nothing was changed.
    :raises BoundKeyMismatch: one of the rows does not have the key that ``bound()`` has set;
        nothing was changed.
    """
    rows = _dependent_rows(field, sub_objs)
    for alias in _aliases(field, rows):
        collector.fast_deletes.append(_ShardUpdate(rows.using(alias), field))


# Make Django pass ``sub_objs`` as a queryset that has not been run. Otherwise, Django would run it
# on the global database.
CASCADE.lazy_sub_objs = True  # type: ignore[attr-defined]  # a function type has no such attribute
PROTECT.lazy_sub_objs = True  # type: ignore[attr-defined]  # a function type has no such attribute
SET_NULL.lazy_sub_objs = True  # type: ignore[attr-defined]  # a function type has no such attribute

#: The policies (values of ``on_delete``) that query shards. They are for foreign keys from shards
#: to the global database.
POLICIES = (CASCADE, PROTECT, SET_NULL)


class _DependentRows(ShardedQuerySet[Any]):
    """Rows on shards that refer to global rows.

    If these rows are deleted, Django's signals have an argument ``origin``. As in one database, it
    is the object whose ``delete()`` the program has called, that is, an instance or queryset of the
    global rows.
    """

    #: The instance or queryset whose ``delete()`` was called.
    origin: Any = None

    def _clone(self) -> Self:
        clone = super()._clone()
        clone.origin = self.origin
        return clone

    def _delete_on_named_shard(self) -> tuple[int, dict[str, int]]:
        collector = Collector(using=self.db, origin=self.origin)
        collector.collect(prepared_for_deletion(self))
        return collector.delete()


def _dependent_rows(field: ForeignKey[Any, Any], sub_objs: QuerySet[Any]) -> _DependentRows:
    """Return a query of the rows on shards that refer, by the foreign key ``field``, to the global
    rows that Django is about to delete.

    :param sub_objs: Django's query for the same rows. Sent as it is, it would look for them in the
        global database.
    """
    if shard_options(sub_objs.model) is None:
        raise CrossShardRelation(
            f"Rows of {sub_objs.model._meta.label} refer to the rows to be deleted by {field.name!r}, and"
            " here their shards are not known, as in a migration. Delete with the models of the"
            " project, outside of migrations."
        )
    # Remove the join to the global database, which the admin adds with select_related(), and load
    # all fields.
    query = sub_objs.select_related(None).defer(None).query.chain(ShardedQuery)
    return _DependentRows(sub_objs.model, query=query)


def _aliases(field: ForeignKey[Any, Any], rows: ShardedQuerySet[Any]) -> list[str]:
    """Return the aliases of the shards that may have ``rows``.

    If ``field`` is the shard key, the ids of the deleted rows are shard keys. Then the result is
    the shards of these keys, without a query for the rows. Otherwise query all shards.

    :raises BoundKeyMismatch: one of the rows does not have the key that ``bound()`` has set.
    """
    if _is_key(field):
        return list(rows.explain_routing().aliases)
    options = shard_options(field.model)
    assert options is not None and options.key is not None
    found = list(rows.only("pk", options.key.name).scatter())
    # Inside bound(), the deletion on each shard would skip rows that do not have the bound key. So
    # refuse such rows here.
    for row in found:
        refuse_other_key(row)
    return sorted({str(row._state.db) for row in found})


def _is_key(field: ForeignKey[Any, Any]) -> bool:
    options = shard_options(field.model)
    return options is not None and field is options.key


def _show(collector: Any, on_shard: Any) -> None:
    """Add the rows of one shard to the rows that the admin will show.

    :param collector: the ``NestedObjects`` (the admin's collector, which deletes nothing) that gets
        the rows.
    :param on_shard: another ``NestedObjects``, which has collected the rows on the shard.
    """
    for parent, rows in on_shard.edges.items():
        for row in rows:
            collector.add_edge(parent, row)
    for model, rows in on_shard.model_objs.items():
        collector.model_objs[model].update(rows)
    collector.protected.update(on_shard.protected)


class _ShardDeletion:
    """Deletes rows on one shard when Django deletes a global row to which they refer.

    It is an item of ``fast_deletes``, a list of Django's collector. Django runs the items of this
    list before it deletes the collected global rows.
    """

    def __init__(self, collector: Collector, rows: _DependentRows) -> None:
        self.model: type[Model] = rows.model
        self._collector = collector
        self._rows = rows

    def _raw_delete(self, using: str) -> int:
        # Collector.delete() calls this method with the alias of the global rows, which is not used.
        _, counts = self._rows.delete()
        own = counts.pop(self.model._meta.label, 0)
        # Rows of other models were deleted, too. Append an item for each such model to
        # fast_deletes. Django is iterating over this list now, and adds up the counts that its
        # items return.
        fast_deletes: Any = self._collector.fast_deletes
        fast_deletes += [_Deleted(label, count) for label, count in counts.items()]
        return own


class _ShardUpdate:
    """Sets foreign keys to NULL on one shard when Django deletes the global row to which they
    refer.

    It is an item of ``fast_deletes``, a list of Django's collector, although it deletes nothing.
    """

    def __init__(self, rows: _DependentRows, field: ForeignKey[Any, Any]) -> None:
        self.model: type[Model] = rows.model
        self._rows, self._field = rows, field

    def _raw_delete(self, using: str) -> int:
        self._rows.update(**{self._field.name: None})
        return 0


class _Deleted:
    """Adds the rows of one model to the counts of deleted rows that ``delete()`` returns.

    It is an item of ``fast_deletes``, a list of Django's collector, but deletes nothing. The rows
    were deleted by a :class:`_ShardDeletion`, together with the rows of its own model.
    """

    def __init__(self, label: str, count: int) -> None:
        self.model = apps.get_model(label)
        self._count = count

    def _raw_delete(self, using: str) -> int:
        return self._count
