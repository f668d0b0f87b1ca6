"""What happens to rows on shards when the global row to which they refer is deleted.

A foreign key from a shard to the global database has no constraint, so only Django can look after
its rows. Pass one of these functions as ``on_delete``::

    author = models.ForeignKey(Author, on_delete.CASCADE, db_constraint=False)

They are called by everything that deletes as Django does: ``delete()`` of a row and of a queryset,
and the admin, whose confirmation shows the rows. If the foreign key is the shard key, only the
shards of the deleted rows are asked; otherwise all shards of the group (a scatter).
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db.models import DO_NOTHING, ForeignKey, Model, QuerySet
from django.db.models import PROTECT as DJANGO_PROTECT
from django.db.models.deletion import Collector

from sharded_orm.cache.request_cache import uncached
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_rows import refuse_other_key
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.query import ShardedQuery

__all__ = ["CASCADE", "LEAVE", "PROTECT"]

#: Leave the rows as they are. They then refer to a row that does not exist; ``shards check`` finds
#: them. No shard is asked.
LEAVE = DO_NOTHING


def CASCADE(
    collector: Any, field: ForeignKey[Any, Any], sub_objs: QuerySet[Any], using: str
) -> None:
    """Delete the rows first, on each shard in a transaction of its own; then the global row.

    If the global row cannot be deleted after that, or the process dies, no row refers to a row that
    does not exist, and the deletion can be run again. A row that is protected or restricted on its
    shard raises an error before anything is deleted.

    Cost for each shard: a deletion as of a queryset. If the shard has to read the rows, because it
    deletes other rows with them, it reads them twice: for the check and for the deletion.

    :raises ProtectedError: a row on a shard protects one of the rows. ``RestrictedError`` likewise.
    :raises ScatterError: a shard did not answer; nothing was deleted.
    :raises BoundKeyMismatch: inside ``bound()``, one of the rows has another key; nothing was deleted.
    """
    shows = hasattr(
        collector, "add_edge"
    )  # It is the NestedObjects of the admin, and never deletes.
    rows = _dependent_rows(field, sub_objs)
    for alias in _aliases(field, rows):
        rows_there = rows.using(alias)
        # Collect what the shard deletes with the rows: this raises an error if something is
        # protected there.
        on_shard = type(collector)(using=alias, origin=collector.origin)
        with uncached():
            on_shard.collect(
                rows_there.prefetch_related(field.name) if shows else rows_there.all(),
                source=field.remote_field.model,
                source_attr=field.name,
            )
        if shows:
            _show(collector, on_shard)
        collector.fast_deletes.append(_ShardDeletion(collector, rows_there))


def PROTECT(
    collector: Any, field: ForeignKey[Any, Any], sub_objs: QuerySet[Any], using: str
) -> None:
    """Raise :exc:`~django.db.models.ProtectedError` with the rows, if there are any.

    :raises ScatterError: a shard did not answer; nothing was deleted.
    """
    rows = _dependent_rows(field, sub_objs)
    with uncached():
        protected: Any = list(rows if _is_key(field) else rows.scatter())
    if protected:
        DJANGO_PROTECT(collector, field, protected, using)


# Django must not read ``sub_objs`` itself: it would look for them in the global database.
CASCADE.lazy_sub_objs = True  # type: ignore[attr-defined]
PROTECT.lazy_sub_objs = True  # type: ignore[attr-defined]

#: The policies that ask shards. They are for foreign keys from shards to the global database.
POLICIES = (CASCADE, PROTECT)


def _dependent_rows(field: ForeignKey[Any, Any], sub_objs: QuerySet[Any]) -> ShardedQuerySet[Any]:
    """Return a query of the rows on shards that refer by ``field`` to the global rows to be deleted.

    :param sub_objs: Django's query of these rows, which names the alias of the global rows.
    """
    if shard_options(sub_objs.model) is None:
        raise CrossShardRelation(
            f"Rows of {sub_objs.model._meta.label} refer to the rows to be deleted by {field.name!r}, and"
            " here their shards are not known, as in a migration. Delete with the models of the"
            " project, outside of migrations."
        )
    # Leave out the join to the global database that the admin adds, and load all fields.
    query = sub_objs.select_related(None).defer(None).query.chain(ShardedQuery)
    return ShardedQuerySet(sub_objs.model, query=query)


def _aliases(field: ForeignKey[Any, Any], rows: ShardedQuerySet[Any]) -> list[str]:
    """Return the aliases of the shards that have ``rows``.

    If ``field`` is the shard key, these are the shards of the keys, whether or not they have rows.

    :raises BoundKeyMismatch: one of the rows has another key than the bound key in force.
    """
    if _is_key(field):
        return list(rows.explain_routing().aliases)
    options = shard_options(field.model)
    assert options is not None and options.key is not None
    found = list(rows.only("pk", options.key.name).scatter())
    # Inside bound(), the deletion on each shard is filtered by the bound key. So refuse rows of other
    # keys, which would remain.
    for row in found:
        refuse_other_key(row)
    return sorted({str(row._state.db) for row in found})


def _is_key(field: ForeignKey[Any, Any]) -> bool:
    options = shard_options(field.model)
    return options is not None and field is options.key


def _show(collector: Any, on_shard: Any) -> None:
    """Add to the admin's ``collector`` what ``on_shard`` has collected.

    Both are ``NestedObjects``, which collects to show and not to delete.
    """
    for parent, rows in on_shard.edges.items():
        for row in rows:
            collector.add_edge(parent, row)
    for model, rows in on_shard.model_objs.items():
        collector.model_objs[model].update(rows)
    collector.protected.update(on_shard.protected)


class _ShardDeletion:
    """The deletion of rows on one shard, as one of the collector's ``fast_deletes``.

    Django runs them before it deletes the collected global rows.
    """

    def __init__(self, collector: Collector, rows: QuerySet[Any]) -> None:
        self.model: type[Model] = rows.model
        self._collector = collector
        self._rows = rows

    def _raw_delete(self, using: str) -> int:
        # Called by Collector.delete() with the alias of the global rows.
        _, counts = self._rows.delete()
        own = counts.pop(self.model._meta.label, 0)
        # Django counts what it goes through. It goes on to what is appended here.
        fast_deletes: Any = self._collector.fast_deletes
        fast_deletes += [_Deleted(label, count) for label, count in counts.items()]
        return own


class _Deleted:
    """Rows of another model, which the shard has deleted together with those of a deletion."""

    def __init__(self, label: str, count: int) -> None:
        self.model = apps.get_model(label)
        self._count = count

    def _raw_delete(self, using: str) -> int:
        return self._count
