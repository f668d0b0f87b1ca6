"""The queryset of sharded models: Django's, sent to the right shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from asgiref.sync import sync_to_async
from django.core.exceptions import FieldError
from django.db.models import CharField, Manager, Model, QuerySet, TextField
from django.db.models.constants import LOOKUP_SEP
from django.db.models.query import MAX_GET_RESULTS, prefetch_related_objects

from sharded_orm import runtime, scatter
from sharded_orm.exceptions import ShardKeyChanged, ShardKeyRequired
from sharded_orm.models.options import (
    ShardOptions,
    shard_key_required,
    shard_options,
)
from sharded_orm.models.relations import by_alias, split_lookups
from sharded_orm.models.routes import Route, only_shard, route, targets
from sharded_orm.models.sql import ShardedQuery
from sharded_orm.scatter import Target
from sharded_orm.signals import scattered


class ShardedQuerySet(QuerySet[Any, Any]):
    """A :class:`~django.db.models.query.QuerySet` that routes itself.

    The shards are read from the where tree each time the query runs: equality on the
    shard key is one shard, ``__in`` the shards of those keys, an instance its own
    shard. A query that says nothing raises :exc:`ShardKeyRequired`; :meth:`scatter`
    asks all shards. Over several shards reads are merged exactly as one database would
    answer, or refused with :exc:`ScatterNotSupported`; writes run shard by shard, each
    atomic on its own shard only (P14).
    """

    _scatters = False
    _partial = False
    #: Where the query that runs right now was routed to: it is not routed again.
    _running_on: str | None = None
    #: After a read with ``scatter(partial=True)``: alias of each failed shard -> its error.
    failed_shards: dict[str, BaseException] = {}

    if TYPE_CHECKING:  # Django's own, which its stubs leave out.
        _db: str | None
        _hints: dict[str, Any]
        _prefetch_related_lookups: tuple[Any, ...]

        def _chain(self) -> Self: ...

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        super().__init__(model, query or ShardedQuery(model), using, hints)

    # -- Routing ---------------------------------------------------------------

    @property
    def _options(self) -> ShardOptions:
        options = shard_options(self.model)
        if options is None:
            raise FieldError(f"{self.model._meta.label} is not a sharded model.")
        return options

    def _pinned(self) -> bool:
        # The group's own alias says no more than "somewhere in the group".
        return self._db is not None and self._db != self._options.group

    def __repr__(self) -> str:
        # What a shell or an error page shows; it must not fail for want of a key.
        try:
            return super().__repr__()
        except ShardKeyRequired as exc:
            return f"<{type(self).__name__} of {self.model.__name__}, not evaluated: {exc}>"

    def _route(self) -> Route:
        return route(self._options, self.query, self._hints, scatter=self._scatters)

    @property
    def db(self) -> str:
        """The alias this query runs on if it runs now; the group's alias if that is several.

        SQL on the group's alias is refused, so whatever is not prepared for several
        shards fails closed.
        """
        if self._running_on is not None:
            return self._running_on
        if self._pinned():
            return str(self._db)
        options = self._options
        if (shard := only_shard(options, self.query)) is not None:
            return shard.alias
        found = self._route()
        return found.aliases[0] if len(found.shards) == 1 else found.group

    def _destination(self) -> str | list[Target]:
        """The one alias that Django's own code is right for, or the shards to merge."""
        if self._pinned():
            return str(self._db)
        options = self._options
        if (shard := only_shard(options, self.query)) is not None:
            return shard.alias
        found = self._route()
        if len(found.shards) == 1:
            return found.aliases[0]
        if len(found.shards) > 1 and self._scatters:
            scattered.announce(self.model, found)
        return targets(options, self.query, found)

    def _targets(self) -> list[Target] | None:
        """The shards to merge; None when Django's own code on :attr:`db` is right."""
        where = self._destination()
        return None if isinstance(where, str) else where

    def _run_on(self, alias: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Django's own code on ``alias``; it asks for :attr:`db` up to three times."""
        self._running_on = alias
        try:
            return run(*args, **kwargs)
        finally:
            self._running_on = None

    def explain_routing(self) -> Route:
        """Where this query would go, and why. Runs no query but the directory's.

        ``str()`` of the answer is a sentence; it has ``shards``, ``aliases``, ``nodes``
        and ``reason``.
        """
        if self._pinned():
            alias, group = str(self._db), self._options.group
            reason = f"using({alias!r}) names it"
            shard = runtime.topology().resolve(alias)
            if shard is None or shard.group != group:
                return Route(group, (), reason, outside=alias)
            return Route(group, (shard.number,), reason)
        return self._route()

    def scatter(self, *, partial: bool = False) -> Self:
        """Allow this query to ask every shard of its group.

        :param partial: give the rows of the shards that answer instead of raising
            :exc:`ScatterError`; :attr:`failed_shards` then tells which did not.
        """
        clone = self._chain()
        clone._scatters, clone._partial = True, partial
        return clone

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]
        if self._scatters:
            clone._scatters, clone._partial = True, self._partial
        return clone

    def __or__(self, other: Any) -> Any:
        return self._without_hints(other, super().__or__(other))

    def __xor__(self, other: Any) -> Any:
        return self._without_hints(other, super().__xor__(other))  # type: ignore[misc]

    def _without_hints(self, other: Any, combined: Any) -> Any:
        # Django keeps the hints and alias of the left side, which bound that side only.
        if isinstance(combined, ShardedQuerySet) and combined is not self and combined is not other:
            if combined._hints != getattr(other, "_hints", None):
                combined._hints = {}
            combined._scatters = self._scatters or getattr(other, "_scatters", False)
        return combined

    # -- Reading ---------------------------------------------------------------

    def _rows(self, several: list[Target]) -> Iterator[Any]:
        return scatter.fetch(self, several, **self._merging())

    def _merging(self, *, groups: bool = True) -> dict[str, Any]:
        """How the engine merges: what may fail, and what one shard holds alone."""
        failed: dict[str, BaseException] = {}
        self.failed_shards = failed
        how: dict[str, Any] = {
            "partial": self._partial,
            "on_failure": lambda error: failed.update(error.failures),
        }
        key = self._options.key
        # A key of text may be equal to another key in the database's collation only.
        exact = key is not None and not isinstance(_target(key), CharField | TextField)
        if groups:
            how["local_columns"] = frozenset({key.column} if exact and key is not None else ())
        return how

    def _fetch_all(self) -> None:
        if self._result_cache is not None:
            super()._fetch_all()
            return
        where = self._destination()
        if isinstance(where, str):
            self._run_on(where, super()._fetch_all)
            return
        self._result_cache = list(self._rows(where))
        super()._fetch_all()

    def _prefetch_related_objects(self) -> None:
        # Django routes a prefetch by its first instance; rows of several shards are
        # prefetched shard by shard, except what they refer to in the global database.
        outside, beside = split_lookups(self.model, self._prefetch_related_lookups)
        rows: list[Model] = self._result_cache or []
        if outside:
            prefetch_related_objects(rows, *outside)
        for instances in by_alias(rows) if beside else ():
            prefetch_related_objects(instances, *beside)
        self._prefetch_done = True

    def _iterator(self, use_chunked_fetch: bool, chunk_size: int | None) -> Iterator[Any]:
        several = self._targets()
        if several is None:
            return super()._iterator(use_chunked_fetch, chunk_size)  # type: ignore[misc,no-any-return]
        return self._scattered_iterator(several, chunk_size)

    def _scattered_iterator(self, several: list[Target], chunk_size: int | None) -> Iterator[Any]:
        rows = self._rows(several)
        if not self._prefetch_related_lookups:
            yield from rows
            return
        size = chunk_size or 1
        while chunk := list(islice(rows, size)):
            prefetched = self._chain()
            prefetched._result_cache = chunk
            prefetched._prefetch_related_objects()
            yield from chunk

    async def aiterator(self, chunk_size: int = 2000) -> Any:
        # Routing may ask the directory, which an event loop must not wait for.
        settled = await sync_to_async(self._settled)()
        if settled is not None:
            async for row in super(ShardedQuerySet, settled).aiterator(chunk_size):
                yield row
            return
        rows = await sync_to_async(self.iterator)(chunk_size)
        take = sync_to_async(_take)
        while chunk := await take(rows, chunk_size):
            for row in chunk:
                yield row

    def _settled(self) -> Self | None:
        """This queryset on its one shard by name; None if it is about several."""
        if self._targets() is not None:
            return None
        clone = self._chain()
        clone._db = self.db
        return clone

    def get(self, *args: Any, **kwargs: Any) -> Any:
        query = self.query
        if query.combinator or query.is_sliced or query.distinct_fields or query.select_for_update:
            return super().get(*args, **kwargs)
        # What Django's method does, on one copy of the query instead of two: this is
        # the commonest of all queries.
        found = self.filter(*args, **kwargs)
        found.query.clear_ordering(force=True)
        found.query.set_limits(high=MAX_GET_RESULTS)
        rows = list(found)
        if len(rows) == 1:
            return rows[0]
        if rows:
            return super().get(*args, **kwargs)  # Raises MultipleObjectsReturned.
        raise self.model.DoesNotExist(
            f"{self.model._meta.object_name} matching query does not exist."
        )

    def count(self) -> int:
        if self._result_cache is not None:
            return super().count()
        where = self._destination()
        if isinstance(where, str):
            return int(self._run_on(where, super().count))
        return scatter.count(self, where, **self._merging())

    def exists(self) -> bool:
        if self._result_cache is not None:
            return super().exists()
        where = self._destination()
        if isinstance(where, str):
            return bool(self._run_on(where, super().exists))
        return scatter.exists(self, where, **self._merging())

    def aggregate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        several = self._targets()
        if several is None:
            return super().aggregate(*args, **kwargs)
        for arg in args:
            try:
                kwargs[arg.default_alias] = arg
            except (AttributeError, TypeError):
                raise TypeError("Complex aggregates require an alias") from None
        return scatter.aggregate(self, several, kwargs, **self._merging(groups=False))

    def explain(self, *, format: str | None = None, **options: Any) -> str:
        several = self._targets()
        if several is None:
            return super().explain(format=format, **options)
        # One plan per shard, each under its alias: shards may differ in their rows.
        return "\n\n".join(
            f"-- {target.shard.alias}\n{self._on(target).explain(format=format, **options)}"
            for target in several
        )

    def in_bulk(self, id_list: Any = None, *, field_name: str = "pk") -> dict[Any, Any]:
        # Django asks connections[self.db] about its limits before it adds the ids; on a
        # query over several shards that is the group's alias, whose limits are the same.
        return super().in_bulk(id_list, field_name=field_name)

    def raw(
        self, raw_query: Any, params: Any = (), translations: Any = None, using: Any = None
    ) -> Any:
        """Raw SQL on one shard: of ``using``, of the filters so far, or :exc:`ShardKeyRequired`."""
        if using is None and not self._pinned():
            found = self._route()
            if len(found.shards) != 1:
                raise ShardKeyRequired(
                    f"raw() on {self.model.__name__} runs on one shard, and this query is about"
                    f" {len(found.shards)}: filter by one key before it, or name the shard with"
                    f" raw(…, using='{found.group}_00000')."
                )
            using = found.aliases[0]
        return super().raw(raw_query, params, translations, using or self._db)

    # -- Writing ---------------------------------------------------------------

    def _on(self, target: Target) -> Self:
        """This queryset on one shard, with the query that the shard is asked."""
        clone = self._chain()
        clone.query = target.query.chain()
        clone._db = target.shard.alias
        return clone

    def create(self, **kwargs: Any) -> Any:
        if not self._pinned():
            # The row's own key places it; a filter before it does not.
            self._for_write = True
            obj = self.model(**kwargs)
            obj.save(force_insert=True, using=self._hinted_alias())
            return obj
        return super().create(**kwargs)

    def _hinted_alias(self) -> str | None:
        return self._db

    def get_or_create(self, defaults: Any = None, **kwargs: Any) -> tuple[Any, bool]:
        if not self._pinned():
            return self._at_key(kwargs).get_or_create(defaults, **kwargs)
        return super().get_or_create(defaults, **kwargs)

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **kwargs: Any
    ) -> tuple[Any, bool]:
        self._refuse_key(defaults or (), "update_or_create()", kwargs)
        if not self._pinned():
            return self._at_key(kwargs).update_or_create(defaults, create_defaults, **kwargs)
        return super().update_or_create(defaults, create_defaults, **kwargs)

    def _at_key(self, given: dict[str, Any]) -> Self:
        """This queryset on the shard of the row that ``given`` finds or creates.

        The key must be among what the row is looked up by: a key in ``defaults`` alone
        could miss a row of another shard.
        """
        options = self._options
        names = (options.key.name, options.key.attname) if options.key is not None else ()
        for name in (n for n in names if n in given):
            probe = self.model(**{name: given[name]})
            return self.using(options.place(probe).alias)
        found = self._chain()
        conditions = {k: v for k, v in given.items() if LOOKUP_SEP not in k}
        found = found.filter(**conditions) if conditions else found
        known = found._route()
        if len(known.shards) != 1:
            raise shard_key_required(options, "the row to find or create is on no one shard")
        return self.using(known.aliases[0])

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Rows grouped by shard: one batch of ids, one insert per shard and batch.

        Atomic per shard, not over shards: when a shard fails, the shards before it
        keep their rows.
        """
        objs = list(objs)
        if self._pinned() or not objs:
            for obj in objs:
                obj._refuse_other_shard(self._db)
            self._fill_ids(objs)
            return super().bulk_create(objs, *args, **kwargs)
        options = self._options
        self._for_write = True
        by_shard = _by_shard(options, objs)
        self._fill_ids(objs)
        for number, rows in sorted(by_shard.items()):
            alias = runtime.shard(options.group, number).alias
            super(ShardedQuerySet, self.using(alias)).bulk_create(rows, *args, **kwargs)
        return objs

    def _fill_ids(self, objs: list[Any]) -> None:
        for field in self.model._meta.concrete_fields:
            fill = getattr(field, "fill_many", None)
            if fill is not None:
                fill(objs)

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: Any = None
    ) -> int:
        objs, fields = tuple(objs), tuple(fields)
        self._refuse_key(fields, "bulk_update()")
        if self._pinned() or not objs or not fields:
            return super().bulk_update(objs, fields, batch_size)
        by_shard: dict[str, list[Any]] = {}
        for obj in objs:
            alias = obj._state.db
            if alias is None or obj._state.adding:
                shard = self._options.locate(obj)
                alias = shard.alias if shard is not None else None
            if alias is not None:
                obj._refuse_other_shard(alias)
                by_shard.setdefault(alias, []).append(obj)
        return sum(
            super(ShardedQuerySet, self.using(alias)).bulk_update(rows, fields, batch_size)
            for alias, rows in sorted(by_shard.items())
        )

    def update(self, **kwargs: Any) -> int:
        self._refuse_key(kwargs, "update()")
        if self.query.is_sliced or self.query.combinator:
            return super().update(**kwargs)  # Refuses it.
        where = self._destination()
        if isinstance(where, str):
            return int(self._run_on(where, super().update, **kwargs))
        self._result_cache = None
        return sum(super(ShardedQuerySet, self._on(target)).update(**kwargs) for target in where)

    def delete(self) -> tuple[int, dict[str, int]]:
        several = None if self.query.is_sliced or self.query.combinator else self._targets()
        if several is None:
            return super().delete()
        total, per_model = 0, dict[str, int]()
        for target in several:
            deleted, counts = super(ShardedQuerySet, self._on(target)).delete()
            total += deleted
            for label, number in counts.items():
                per_model[label] = per_model.get(label, 0) + number
        self._result_cache = None
        return total, per_model

    delete.alters_data = True  # type: ignore[attr-defined]
    delete.queryset_only = True  # type: ignore[attr-defined]

    def _refuse_key(self, names: Iterable[str], method: str, lookup: Any = None) -> None:
        key = self._options.key
        if key is None:
            return
        for name in names:
            if name in (key.name, key.attname):
                same = lookup is not None and name in lookup
                if same and isinstance(names, dict) and names[name] == lookup[name]:
                    continue
                raise ShardKeyChanged(
                    f"{method} cannot set {name!r} of {self.model.__name__}: it is the shard key, and"
                    " the rows would stay on the wrong shard. Create the row under the new key and"
                    " delete the old one."
                )


def _by_shard(options: ShardOptions, objs: list[Any]) -> dict[int, list[Any]]:
    """Places the keys of new rows; the rows of each shard in their order."""
    if options.key is None:
        options.key_of(objs[0])  # Raises: there is none.
    assert options.key is not None
    values = list(map(attrgetter(options.key.attname), objs))
    # Many rows have few keys, and making a key of a value costs more than finding it.
    samples = dict(zip(values, objs, strict=True))
    keys = {value: options.key_of(obj) for value, obj in samples.items()}
    numbers = runtime.strategy(options.group).place_many(dict.fromkeys(keys.values()))
    shards = {value: numbers[key] for value, key in keys.items()}
    found: dict[int, list[Any]] = {}
    for value, obj in zip(values, objs, strict=True):
        found.setdefault(shards[value], []).append(obj)
    return found


def _target(field: Any) -> Any:
    """The field that a foreign key, or a chain of them, refers to in the end."""
    while field.remote_field is not None:
        field = field.target_field
    return field


def _take(rows: Iterator[Any], size: int) -> list[Any]:
    return list(islice(rows, size))


ShardedManager: Callable[[], Manager[Any]] = Manager.from_queryset(
    ShardedQuerySet, class_name="ShardedManager"
)
"""The manager of :class:`ShardedModel`; derive yours from it or from a
:class:`ShardedQuerySet` with ``as_manager()``."""
