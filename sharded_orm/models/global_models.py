""":class:`GlobalModel`, the base class of models whose rows are in the global database."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from django.db import DEFAULT_DB_ALIAS, models

from sharded_orm.cache import request_cache
from sharded_orm.models.cached.model_cache import CacheAttribute
from sharded_orm.models.cached.queryset import CachedQuerySet
from sharded_orm.models.cached.write_tracking import writing
from sharded_orm.models.querysets.direct_plans import DirectPlanReader
from sharded_orm.models.sharding.colocation import Colocation
from sharded_orm.models.sharding.statements import (
    check_aggregates,
    check_found_or_created,
    check_insert,
    check_update,
    check_values,
    has_expressions,
    has_lazy,
    named_aggregates,
)
from sharded_orm.models.sharding.type_variables import M


class GlobalQuerySet(DirectPlanReader[M], CachedQuerySet[M]):
    """The queryset of global models, whose rows are in the global database (Yupoo, Y1).

    It also has methods of sharded querysets, such as ``scatter()``, so that code for sharded models
    works with global models. A join to a sharded model raises :exc:`CrossShardRelation`.
    """

    @property
    def db(self) -> str:
        alias = super().db
        Colocation(None, alias).check(self.query)
        return alias

    def aggregate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        aggregates = named_aggregates(args, kwargs)
        check_aggregates(Colocation(None, super().db), self.query, aggregates)
        return super().aggregate(**aggregates)

    def update(self, **kwargs: Any) -> int:
        check_values(Colocation(None, super().db), self.query, kwargs.values())
        return super().update(**kwargs)

    def get_or_create(self, defaults: Any = None, **kwargs: Any) -> tuple[M, bool]:
        check_found_or_created(Colocation(None, super().db), self.model, None, defaults)
        return super().get_or_create(defaults, **kwargs)

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **kwargs: Any
    ) -> tuple[M, bool]:
        new = defaults if create_defaults is None else create_defaults
        check_found_or_created(Colocation(None, super().db), self.model, defaults, new)
        return super().update_or_create(defaults, create_defaults, **kwargs)

    def bulk_create(self, objs: Any, *args: Any, **kwargs: Any) -> list[M]:
        objs = list(objs)
        check_insert(Colocation(None, super().db), objs)
        return super().bulk_create(objs, *args, **kwargs)

    def scatter(self, *, partial: bool = False) -> Self:
        """Return a copy of the queryset. Like the original, the copy reads the global database.

        The method exists so that code for sharded models works with global models.
        """
        return self._chain()

    def explain_routing(self) -> str:
        """Return the database of this query as text: ``the global database, alias 'default'``."""
        return f"the global database, alias {self.db!r}"

    async def aexplain_routing(self) -> str:
        """Return what :meth:`explain_routing` returns. Sends no query."""
        return self.explain_routing()


GlobalManager = models.Manager.from_queryset(GlobalQuerySet, class_name="GlobalManager")


class GlobalModel(models.Model):
    """A model whose rows are in the global database, because no shard key owns them (Yupoo, Y1).

    ``class ShardMeta`` is optional. Its ``cache = True`` turns on the cache for the model. With an
    ``isolate_key``, such as ``album_id``, a write voids the cached lists of the row's album, but
    not those of other albums (Yupoo, Y16).
    """

    _is_sharded: ClassVar[bool] = False

    cache = CacheAttribute()
    objects = GlobalManager()

    class Meta:
        abstract = True

    def save_base(self, *args: Any, **kwargs: Any) -> None:
        # Check the expressions among the values, but not lazy objects, because a receiver of
        # pre_save may still replace these. _do_update() and _do_insert() check lazy objects.
        check_update(Colocation(None, DEFAULT_DB_ALIAS), [self], lazy=False)
        with writing(self):
            super().save_base(*args, **kwargs)

    save_base.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _do_update(
        self, base_qs: Any, using: Any, pk_val: Any, values: Any, update_fields: Any, *rest: Any
    ) -> Any:
        # Overrides Model._do_update().
        if has_lazy(values):
            check_update(Colocation(None, DEFAULT_DB_ALIAS), [self], update_fields)
        return super()._do_update(base_qs, using, pk_val, values, update_fields, *rest)

    def _do_insert(self, *args: Any, **kwargs: Any) -> Any:
        # Overrides Model._do_insert().
        if has_expressions(self):
            check_update(Colocation(None, DEFAULT_DB_ALIAS), [self])
        return super()._do_insert(*args, **kwargs)  # type: ignore[misc]  # not in the stubs

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        with writing(self):
            return super().delete(*args, **kwargs)

    delete.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        # Read the database itself, because the project's base manager may read through the cache,
        # which may be out of date.
        with request_cache.uncached():
            super().refresh_from_db(using=using, fields=fields, from_queryset=from_queryset)
