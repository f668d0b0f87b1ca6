"""Querysets that filter by the bound key.

The bound key is the shard key that a ``with bound()`` block or a request sets for all its queries;
see :class:`sharded_orm.models.sharding.bound_key.bound`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Self, overload

from django.db import connections
from django.db.models import Model
from django.db.models.query import EmptyQuerySet, ModelIterable

from sharded_orm.exceptions import BoundKeyMismatch
from sharded_orm.models.querysets.reads import ReadingQuerySet
from sharded_orm.models.querysets.route import Route
from sharded_orm.models.querysets.update_conflicts import refuse_upserts_without_key
from sharded_orm.models.querysets.writes import WritingQuerySet
from sharded_orm.models.sharding.bound_key import (
    EXEMPT,
    BoundKey,
    is_any_bound,
    iterate_inside,
    iterate_inside_async,
    key_in_force,
    prepared_key,
    unbound,
)
from sharded_orm.models.sharding.bound_rows import (
    give_bound_key,
    refuse_other_key,
    refuse_rows_given_by_id,
    refuse_values_given_by_id,
    related_rows_checked,
)
from sharded_orm.models.sharding.same_key import key_names
from sharded_orm.models.sharding.type_variables import M


def _with_key(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls ``method`` on a copy of its queryset, filtered by the bound key.

    The bound key is the shard key that a ``with bound()`` block or a request has set.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self._with_bound_key(), *args, **kwargs)

    return run


class BoundKeyQuerySet(ReadingQuerySet[M], WritingQuerySet[M]):
    """A mixin that filters each query by the bound key when the query is run.

    The bound key is the shard key that a ``with bound()`` block or a request sets for its queries.

    A queryset remembers the key that was bound when it was built; see
    :class:`~sharded_orm.models.sharding.bound_query.BoundKeyQuery`. Each method that sends a query
    adds the condition on the key to a copy, and runs the copy. The queryset itself has no condition
    on the key. So :meth:`scatter` can still make a queryset for all keys from it.
    """

    #: Whether this queryset is a copy that has the condition on the bound key (set by bound()).
    _has_bound_key = False

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        super().__init__(model, query, using, hints)
        if is_any_bound():
            self.query.take_bound_key()  # type: ignore[attr-defined]  # ShardedQuery has this method

    def _with_bound_key(self) -> Self:
        """Return the queryset to be run: this one, or a copy that is filtered by the bound key.

        The bound key is the shard key that a ``with bound()`` block or a request has set.

        :raises BoundKeyMismatch: the key that is bound now differs from the key that was bound when
            the queryset was built.
        """
        if self._has_bound_key:
            return self
        key = key_in_force(self.model)
        query: Any = self.query
        if query.bound_key == EXEMPT or (key is None and query.bound_key is None):
            return self
        if key is not None:
            self._check_against(key)
        keyed = self._chain()
        # Set _query, because Django's setter of ``query`` would also set _iterable_class, so that
        # values_list() would become values().
        keyed._query = keyed.query.with_bound_key()  # type: ignore[attr-defined]  # ShardedQuery has this method
        keyed._has_bound_key = True
        keyed._result_cache = self._result_cache
        return keyed

    def _check_against(self, key: BoundKey) -> None:
        """Raise an error if rows of this queryset do not have the bound key.

        Two things are checked: rows that the queryset has read already, and the instance of a
        related manager, such as ``album`` for ``album.photos``.

        :param key: the key that is bound now.
        """
        query: Any = self.query
        if isinstance(instance := self._hints.get("instance"), Model):
            refuse_other_key(instance)
        if self._result_cache is None:
            return
        if query.bound_key is None and query.lacks(key):
            # The rows were read before bound() set this key, so they may not have it. Check the
            # keys of model instances. Refuse the results of values() and similar calls, because
            # they may lack the key.
            if not issubclass(self._iterable_class, ModelIterable):
                raise BoundKeyMismatch(
                    f"Values of {self.model.__name__} were read outside of the block, and may be of"
                    f" another key. ({key} is in force.) Read them inside."
                )
            for row in self._result_cache:
                refuse_other_key(row)
        query.take_bound_key()

    def _check_kept_rows(self) -> None:
        key = key_in_force(self.model)
        if self._result_cache is not None and key is not None and not self._has_bound_key:
            self._check_against(key)

    @overload
    def __getitem__(self, k: int) -> M: ...
    @overload
    def __getitem__(self, k: slice) -> Self: ...
    def __getitem__(self, k: Any) -> Any:
        self._check_kept_rows()
        return super().__getitem__(k)

    def _fetch_all(self) -> None:
        if self._result_cache is not None:
            self._check_kept_rows()
            super()._fetch_all()
            return
        keyed = self._with_bound_key()
        if keyed is not self:
            # The rows that are read now stay in this queryset. So store their key in the queryset
            # itself, and not only in the copy. If another key is bound later, the queryset then
            # raises an error, instead of returning these rows.
            self.query.take_bound_key()  # type: ignore[attr-defined]  # ShardedQuery has this method
            keyed._fetch_all()
            self._result_cache, self._prefetch_done = keyed._result_cache, keyed._prefetch_done
            return
        super()._fetch_all()

    def _prefetch_related_objects(self) -> None:
        if not self._prefetches_all_keys():
            super()._prefetch_related_objects()
            return
        with unbound():
            super()._prefetch_related_objects()

    def _iterator(self, use_chunked_fetch: bool, chunk_size: int | None) -> Iterator[Any]:
        rows = super(BoundKeyQuerySet, self._with_bound_key())._iterator(
            use_chunked_fetch, chunk_size
        )
        return iterate_inside(unbound(), rows) if self._prefetches_all_keys() else rows

    def aiterator(self, chunk_size: int = 2000) -> AsyncIterator[M]:
        rows = super(BoundKeyQuerySet, self._with_bound_key()).aiterator(chunk_size)
        return iterate_inside_async(unbound(), rows) if self._prefetches_all_keys() else rows

    def _prefetches_all_keys(self) -> bool:
        """Whether this queryset has prefetches and, inside of ``bound()``, reads rows of all keys.

        :meth:`scatter` makes such a queryset. Its prefetches must then read rows of all keys, too.

        :raises BoundKeyMismatch: a queryset in the prefetches was built while a key was bound, so
            it has rows of one key only.
        """
        # Do not read the property ``query`` before it is needed. A queryset that is read with a
        # plan has no query, and the property would build one.
        if not self._prefetch_related_lookups or not is_any_bound():
            return False
        query: Any = self.query
        if query.bound_key != EXEMPT:
            return False
        _refuse_prefetches_of_one_key(self)
        return True

    @property
    def db(self) -> str:
        if self._running_on is not None:
            return self._running_on
        keyed = self._with_bound_key()
        return super(BoundKeyQuerySet, keyed).db

    def get(self, *args: Any, **kwargs: Any) -> M:
        return super(BoundKeyQuerySet, self._with_bound_key()).get(*args, **kwargs)

    def get_or_create(self, defaults: Any = None, **kwargs: Any) -> tuple[M, bool]:
        keyed = self._with_bound_key()
        named = keyed._naming_bound_key(kwargs, defaults)
        return super(BoundKeyQuerySet, keyed).get_or_create(defaults, **named)

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **kwargs: Any
    ) -> tuple[M, bool]:
        keyed = self._with_bound_key()
        named = keyed._naming_bound_key(kwargs, defaults, create_defaults)
        return super(BoundKeyQuerySet, keyed).update_or_create(defaults, create_defaults, **named)

    def _naming_bound_key(
        self, lookup: dict[str, Any], *new_values: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return ``lookup`` with the bound key (set by ``bound()``) added.

        :param lookup: keyword arguments such as those of ``get()``.
        :param new_values: values of the row that is created or updated, such as ``defaults``.
        :raises BoundKeyMismatch: one of the arguments contains a shard key that is not the bound
            key.
        """
        query: Any = self.query
        bound_key: BoundKey | None = query.bound_key
        if bound_key is None or bound_key == EXEMPT:
            return lookup
        field: Any = self._options.key
        names = key_names(self._options)
        for values in (lookup, *new_values):
            for name in names.intersection(values or ()):
                value = (values or {})[name]
                # Do not check a callable. Its value is computed later, and is checked when the row
                # is saved.
                if not callable(value) and prepared_key(field, value) != bound_key.value:
                    raise BoundKeyMismatch(
                        f"{name}={value!r} of {self.model.__name__} is not {bound_key}, which is in"
                        " force. Leave it out, or leave the key with sharded_orm.unbound()."
                    )
        return lookup if names & lookup.keys() else {**lookup, bound_key.name: bound_key.value}

    # Hide the wrapped methods from type checkers, which then use the types of the base classes.
    if not TYPE_CHECKING:
        _prepared = _with_key(ReadingQuerySet._prepared)
        in_bulk = _with_key(ReadingQuerySet.in_bulk)
        contains = _with_key(ReadingQuerySet.contains)
        count = _with_key(ReadingQuerySet.count)
        exists = _with_key(ReadingQuerySet.exists)
        aggregate = _with_key(ReadingQuerySet.aggregate)
        explain = _with_key(ReadingQuerySet.explain)
        create = _with_key(WritingQuerySet.create)

    def raw(
        self, raw_query: Any, params: Any = (), translations: Any = None, using: Any = None
    ) -> Any:
        """Run raw SQL on one shard, see :meth:`ReadingQuerySet.raw`.

        The bound key (set by ``bound()``) cannot filter raw SQL, so it does not choose the shard.
        """
        self._with_bound_key()  # Raises an error if a condition contains a wrong key.
        return super().raw(raw_query, params, translations, using)

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[M]:
        objs = list(objs)
        keyed = self._with_bound_key()
        if (key := key_in_force(self.model)) is not None:
            for obj in objs:
                give_bound_key(obj)
                refuse_rows_given_by_id(obj)
            names = ("batch_size", "ignore_conflicts", "update_conflicts", "update_fields")
            arguments = {**dict(zip((*names, "unique_fields"), args, strict=False)), **kwargs}
            if arguments.get("update_conflicts"):
                features = connections[self._options.group].features
                has_target = features.supports_update_conflicts_with_target
                unique_fields = arguments.get("unique_fields") if has_target else None
                refuse_upserts_without_key(self._options, key, objs, unique_fields)
        return super(BoundKeyQuerySet, keyed).bulk_create(objs, *args, **kwargs)

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: Any = None
    ) -> int:
        objs, fields = tuple(objs), tuple(fields)
        for obj in objs:
            refuse_other_key(obj)
            refuse_rows_given_by_id(obj, fields)
        keyed = self._with_bound_key()
        # Skip the check of related rows' keys in update(), because they were checked above.
        # Django's bulk_update() passes expressions to update(), and the check cannot look into
        # them.
        with related_rows_checked():
            return super(BoundKeyQuerySet, keyed).bulk_update(objs, fields, batch_size)

    def update(self, **kwargs: Any) -> int:
        keyed = self._with_bound_key()
        query: Any = keyed.query
        if query.bound_key != EXEMPT:
            refuse_values_given_by_id(self.model, kwargs)
        rows = super(BoundKeyQuerySet, keyed).update(**kwargs)
        self._result_cache = None
        return rows

    def delete(self) -> tuple[int, dict[str, int]]:
        deleted = super(BoundKeyQuerySet, self._with_bound_key()).delete()
        self._result_cache = None
        return deleted

    delete.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too
    delete.queryset_only = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def explain_routing(self) -> Route:
        keyed = self._with_bound_key()
        route = super(BoundKeyQuerySet, keyed).explain_routing()
        query: Any = keyed.query
        if query.bound_key is None or query.bound_key == EXEMPT:
            return route
        return replace(route, reason=f"{route.reason}, under {query.bound_key}")

    def scatter(self, *, partial: bool = False) -> Self:
        """Return a copy of this queryset whose query may go to every shard of its group.

        The copy reads the rows of all keys, even inside a ``with bound()`` block.

        :param partial: what to do if a shard fails. False (the default): raise :exc:`ScatterError`.
            True: return the rows of the other shards, with the errors in :attr:`failed_shards`. A
            table or column that is missing on every shard raises :exc:`ScatterError` in any case,
            because the query may be wrong.
        """
        clone = super().scatter(partial=partial)
        query: Any = clone.query
        query.bound_key = EXEMPT
        return clone

    def __and__(self, other: Any) -> Any:
        self._refuse_part_of_other_key(other)
        return super().__and__(other)

    def __or__(self, other: Any) -> Any:
        self._refuse_part_of_other_key(other)
        return super().__or__(other)

    def __xor__(self, other: Any) -> Any:
        self._refuse_part_of_other_key(other)
        return super().__xor__(other)

    def _refuse_part_of_other_key(self, other: Any) -> None:
        # A combined queryset has only one bound key (set by bound()). So refuse to combine
        # querysets that have different bound keys.
        if not isinstance(other, BoundKeyQuerySet) or other.model is not self.model:
            return
        if isinstance(self, EmptyQuerySet) or isinstance(other, EmptyQuerySet):
            return
        keys = [_key_of_copy(self), _key_of_copy(other)]
        if keys[0] != keys[1]:
            if EXEMPT in keys:
                raise BoundKeyMismatch(
                    f"Only one of these querysets of {self.model.__name__} is for all keys, by"
                    " scatter() or inside unbound(), so they cannot be combined. Remedy: call"
                    " scatter() on both, or on the combination only."
                )
            shown = " and ".join("no bound key" if key is None else str(key) for key in keys)
            raise BoundKeyMismatch(
                f"Querysets of {self.model.__name__} that were built under {shown} cannot be"
                " combined. Build both inside the same block."
            )

    def _combinator_query(self, combinator: str, *others: Any, **kwargs: Any) -> Any:
        # A queryset that was built before the ``bound()`` block does not know the bound key. A copy
        # that is made inside of the block knows it. So combine copies of the querysets.
        if not is_any_bound():
            return super()._combinator_query(combinator, *others, **kwargs)
        copies = [
            other._chain() if isinstance(other, BoundKeyQuerySet) else other for other in others
        ]
        return super(BoundKeyQuerySet, self._chain())._combinator_query(
            combinator, *copies, **kwargs
        )


def _key_of_copy(rows: BoundKeyQuerySet[Any]) -> BoundKey | None:
    """Return the bound key that a copy of ``rows`` has, if it is made now.

    It is the key that was bound when ``rows`` was built. If none was bound then, it is the key that
    is bound now.
    """
    query: Any = rows.query
    key: BoundKey | None = query.bound_key
    return key_in_force(rows.model) if key is None else key


def _refuse_prefetches_of_one_key(rows: Any) -> None:
    """Raise :exc:`BoundKeyMismatch` if a prefetch of ``rows`` uses a queryset for one key only.

    Without the error, rows with a different key would seem to have no related rows.

    :param rows: a queryset for all keys.
    """
    for lookup in rows._prefetch_related_lookups:
        querysets = getattr(lookup, "querysets", None) or [getattr(lookup, "queryset", None)]
        for related in querysets:
            if related is None:
                continue
            key = getattr(related.query, "bound_key", None)
            if key is not None and key != EXEMPT:
                raise BoundKeyMismatch(
                    f"{rows.model.__name__}.objects.scatter() reads rows of all keys, and prefetches"
                    f" {lookup.prefetch_to!r} by a queryset that was built under {key}. Call scatter()"
                    " on that queryset too, or build both inside sharded_orm.unbound()."
                )
            _refuse_prefetches_of_one_key(related)
