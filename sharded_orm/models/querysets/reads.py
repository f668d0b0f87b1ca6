"""The reading methods of sharded querysets.

Django's own code runs a query for a single shard. The results of several shards are merged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from asgiref.sync import sync_to_async
from django.db.models import CharField, Model, TextField
from django.db.models.query import ModelIterable, prefetch_related_objects

from sharded_orm import runtime, scatter
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.moves.confirmation import confirmed, confirmed_stream
from sharded_orm.models.querysets.base import RoutedQuerySet
from sharded_orm.models.querysets.one_row import matching_rows, only_row
from sharded_orm.models.querysets.original_methods import gets_as_django
from sharded_orm.models.querysets.prefetch_refusals import refuse_lookups
from sharded_orm.models.querysets.prefetches import one_of_several, split_by_alias, split_lookups
from sharded_orm.models.querysets.raw import RawKeyQuerySet
from sharded_orm.models.querysets.recorder import CallRecorder
from sharded_orm.models.sharding.instance_shard import on_shard_of
from sharded_orm.models.sharding.key_sources import KeyGuess
from sharded_orm.models.sharding.options import target_field
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.statements import check_aggregates, named_aggregates
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.scatter import Target
from sharded_orm.scatter.refusals import refuse

# The number of rows that an iterator reads at a time by default, as in Django.
CHUNK_SIZE = 2000


class ReadingQuerySet(RoutedQuerySet[M]):
    """A mixin with the reading methods of a sharded queryset."""

    def _rows(self, targets: list[Target]) -> Iterator[Any]:
        return scatter.fetch(self, targets, **self._merge_options())

    def _merge_options(self, *, groups: bool = True) -> dict[str, Any]:
        """Return keyword arguments for the functions of :mod:`sharded_orm.scatter`.

        The arguments tell these functions what to do if a shard fails. They also contain the column
        of the shard key, as ``local_columns``. If a GROUP BY contains this column, each group is on
        one shard, and the groups of several shards need not be merged.

        :param groups: whether the function to be called accepts ``local_columns``. If False,
            ``local_columns`` is left out.
        """
        failures: dict[str, BaseException] = {}
        self.failed_shards = failures
        options: dict[str, Any] = {
            "partial": self._partial,
            "on_failure": lambda error: failures.update(error.failures),
        }
        key = self._options.key
        # ``local_columns`` are columns whose equal values are always on one shard. That is not
        # certain for a text key, because a collation may treat different keys as equal.
        is_exact = key is not None and not isinstance(target_field(key), CharField | TextField)
        if groups:
            options["local_columns"] = frozenset(
                {key.column} if is_exact and key is not None else ()
            )
        return options

    def _fetch_all(self) -> None:
        if self._result_cache is not None:
            super()._fetch_all()
            return
        self._proved(self._fetch_rows)

    def _proved(self, read: Callable[[], bool]) -> bool:
        """Call ``read``, and let it use a guess: the shard key that a source of keys remembers.

        A source of keys is an object that looks up a row's shard key by a value in another column.
        If the shard of the guessed key has no matching row, the key may be out of date. Then forget
        the guess and call ``read`` once more, without a guess. See
        :mod:`sharded_orm.models.querysets.guesses`.

        :param read: reads the rows, and returns whether there are any.
        """
        self._may_guess, self._guess, has_rows = True, None, False
        try:
            has_rows = confirmed(self._options.group, read)
        finally:
            key_guess = self._guess_of_read()
            if key_guess is not None and not has_rows:
                key_guess.forget()
        if has_rows or key_guess is None or key_guess.key is None:
            return has_rows
        return confirmed(self._options.group, read)

    def _guess_of_read(self) -> KeyGuess | None:
        """Return the guess (a remembered shard key) that the last read has used, or None.

        This ends the use of guesses, so a second call returns None.
        """
        key_guess, self._may_guess, self._guess = self._guess, False, None
        return key_guess

    def _fetch_rows(self) -> bool:
        # If a key moves during this method, the caller calls the method again. So drop the rows of
        # the first call.
        self._result_cache, self._prefetch_done = None, False
        destination = self._destination()
        if isinstance(destination, str):
            self._run_on(destination, super()._fetch_all)
        else:
            self._refuse_prefetches_of_sets()
            self._result_cache = list(self._rows(destination))
            super()._fetch_all()
        return bool(self._result_cache)

    def _prepared(self) -> Any:
        if self.query.is_empty():
            return None
        destination = self._destination()
        return (
            self._run_on(destination, super()._prepared) if isinstance(destination, str) else None
        )

    def _prefetch_related_objects(self) -> None:
        # Django sends a prefetch to the database of its first instance. So prefetch separately for
        # the instances of each database. But if a lookup begins with a foreign key to another
        # group, the related rows are on other databases anyway; prefetch them for all instances
        # together.
        rows: list[Any] = self._result_cache or []
        if rows and not isinstance(rows[0], Model):
            # values() returns dicts or tuples, for which Django ignores a prefetch.
            super()._prefetch_related_objects()  # type: ignore[misc]  # missing in Django's type stubs
            return
        other_group, same_group = split_lookups(self.model, self._prefetch_related_lookups)
        if other_group:
            prefetch_related_objects(rows, *other_group)
        groups = split_by_alias(rows) if same_group else []
        is_split = len(groups) > 1
        if is_split:
            self._refuse_prefetches_of_sets()
        for instances in groups:
            with one_of_several(is_split):
                prefetch_related_objects(instances, *same_group)
        self._prefetch_done = True

    def _refuse_prefetches_of_sets(self) -> None:
        """Raise an error if a prefetch would be wrong for rows of several shards.

        See :mod:`sharded_orm.models.querysets.prefetch_refusals`.
        """
        if self._prefetch_related_lookups and issubclass(self._iterable_class, ModelIterable):
            # Lookups that leave the group are not split.
            _, same_group = split_lookups(self.model, self._prefetch_related_lookups)
            refuse_lookups(self.model, same_group)

    def _iterator(self, use_chunked_fetch: bool, chunk_size: int | None) -> Iterator[Any]:
        is_scattered = False

        def open_rows() -> Iterator[Any]:
            nonlocal is_scattered
            targets = self._targets()
            is_scattered = targets is not None
            if targets is None:
                return super(ReadingQuerySet, self)._iterator(use_chunked_fetch, chunk_size)  # type: ignore[misc,no-any-return]  # missing in Django's type stubs
            return self._scattered_iterator(targets, chunk_size)

        return confirmed_stream(self._options.group, open_rows, several=lambda: is_scattered)

    def _scattered_iterator(self, targets: list[Target], chunk_size: int | None) -> Iterator[Any]:
        self._refuse_prefetches_of_sets()
        # An iterator is for results that do not fit in memory. So stream the rows.
        rows = scatter.fetch(
            self, targets, stream=True, chunk_size=chunk_size or CHUNK_SIZE, **self._merge_options()
        )
        if not self._prefetch_related_lookups:
            yield from rows
            return
        size = chunk_size or 1
        while chunk := list(islice(rows, size)):
            prefetched = self._chain()
            prefetched._result_cache = chunk
            prefetched._prefetch_related_objects()
            yield from chunk

    async def aiterator(self, chunk_size: int = 2000) -> AsyncIterator[M]:
        # Read in another thread. Finding the shard may also query the directory of keys, which
        # would block the event loop.
        rows = await sync_to_async(self.iterator)(chunk_size)
        take = sync_to_async(_next_rows)
        while chunk := await take(rows, chunk_size):
            for row in chunk:
                yield row

    def get(self, *args: Any, **kwargs: Any) -> M:
        query = self.query
        if (
            query.combinator
            or query.is_sliced
            or query.distinct_fields
            or query.select_for_update
            or not gets_as_django(type(self), CallRecorder)
        ):
            return super().get(*args, **kwargs)
        # This does the same as Django's get(), but copies the query once instead of twice. The
        # saving matters, because get() is the commonest of all queries.
        row: M = only_row(self.model, matching_rows(self.filter(*args, **kwargs)))
        return row

    def in_bulk(self, id_list: Any = None, *, field_name: str = "pk") -> dict[Any, M]:
        # Django's in_bulk() chooses the database before it filters by the ids. But ids can
        # determine the shards. So filter by the ids first, unless the shard is chosen already, or
        # the queryset is a slice, which cannot be filtered.
        if self._is_pinned():
            return super().in_bulk(id_list, field_name=field_name)
        ids = None if id_list is None else list(id_list)
        if ids is not None and field_name == "pk" and not self._partial:
            options = self._options
            if options.key is self.model._meta.pk:
                rows = confirmed(options.group, partial(self._rows_by_pk, ids))
                if rows is not None:
                    return rows
        if self.query.is_sliced:
            return super().in_bulk(ids, field_name=field_name)
        if ids is None:
            return self._rows_by_value(field_name)
        matching = self.filter(**{f"{field_name}__in": ids}) if ids else self.none()
        return matching._rows_by_value(field_name)

    def _rows_by_value(self, field_name: str) -> dict[Any, M]:
        """Read the rows, and return them keyed by a unique field.

        Raise an error if rows on two shards have the same value. This can happen if the field is
        not the shard key, because the field is unique only within each shard. Django's
        ``in_bulk()`` would silently return only one of these rows.
        """
        # Let Django check the arguments. On an empty queryset, its method does nothing else.
        super(ReadingQuerySet, self.none()).in_bulk(field_name=field_name)
        if self._fields is not None:
            # Since Django 6.1, in_bulk() works after values() and values_list(). But these results
            # do not tell their shard, so two rows with the same value could not be noticed.
            if not isinstance(self._destination(ordered=False), str):
                raise refuse(
                    "in_bulk() after values() or values_list()",
                    "read instances, or add a condition on the shard key",
                )
            return super().in_bulk(field_name=field_name)
        rows: dict[Any, M] = {}
        for row in self._chain():
            value = getattr(row, field_name)
            other = rows.setdefault(value, row)
            if other._state.db != row._state.db:
                raise refuse(
                    f"in_bulk() by {field_name!r}, because rows on {other._state.db!r} and"
                    f" {row._state.db!r} have the same value {value!r}",
                    "read the rows with a condition on the shard key, or list() them",
                )
            rows[value] = row
        return rows

    def contains(self, obj: Any) -> bool:
        # Overrides QuerySet.contains(), which compares only primary keys. A row on another shard
        # may have the same primary key as ``obj``. So the found row must also be on the shard of
        # ``obj``.
        home = colocated_alias(self._options, obj) if isinstance(obj, self.model) else None
        is_stored = home is not None and obj._is_pk_set()
        if not is_stored or self._fields is not None or self.query.combinator:
            return super().contains(obj)
        if self._result_cache is not None:
            return super().contains(obj) and any(
                row == obj and row._state.db == home for row in self._result_cache
            )
        if self._is_pinned():
            return self._db == home and super().contains(obj)
        matching = self.filter(on_shard_of(self._options, [obj]))
        return super(ReadingQuerySet, matching).contains(obj)

    def count(self) -> int:
        if self._result_cache is not None:
            return super().count()
        return confirmed(self._options.group, self._count_rows)

    def _count_rows(self) -> int:
        # Without annotations, a copy would not differ in what is checked.
        sent = scatter.counted_query(self.query) if self.query.annotations else None
        destination = self._destination(sent, ordered=self.query.is_sliced)
        if isinstance(destination, str):
            return int(self._run_on(destination, super().count))
        return scatter.count(self, destination, **self._merge_options())

    def exists(self) -> bool:
        if self._result_cache is not None:
            return super().exists()
        return self._proved(self._find_any)

    def _find_any(self) -> bool:
        sent = self.query.exists(limit=False) if self.query.annotations else None
        destination = self._destination(sent, ordered=False)
        if isinstance(destination, str):
            return bool(self._run_on(destination, super().exists))
        return scatter.exists(self, destination, **self._merge_options())

    def aggregate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        aggregates = named_aggregates(args, kwargs)
        return confirmed(self._options.group, lambda: self._aggregate(aggregates))

    def _aggregate(self, aggregates: dict[str, Any]) -> dict[str, Any]:
        sent = self.query
        if sent.annotations:
            sent = scatter.aggregated_query(sent, aggregates)
        destination = self._destination(sent, ordered=sent.is_sliced)
        if not self._is_pinned_by_using():
            check_aggregates(self._colocation(destination), sent, aggregates)
        if isinstance(destination, str):
            values: dict[str, Any] = self._run_on(destination, super().aggregate, **aggregates)
            return values
        return scatter.aggregate(self, destination, aggregates, **self._merge_options(groups=False))

    def explain(self, *, format: str | None = None, **options: Any) -> str:
        targets = self._targets()
        if targets is None:
            return super().explain(format=format, **options)
        # Each shard may execute the query differently, because its rows differ. So return the
        # output of EXPLAIN for each shard.
        return "\n\n".join(
            f"-- {target.shard.alias}\n{self._for_target(target).explain(format=format, **options)}"
            for target in targets
        )

    def raw(
        self, raw_query: Any, params: Any = (), translations: Any = None, using: Any = None
    ) -> Any:
        """Run raw SQL on one shard.

        The argument ``using`` is the alias of the shard. If it is missing, the raw SQL runs on the
        shard that is determined by the queryset's ``using()`` or by its filters.

        :raises ShardKeyRequired: neither the argument nor ``using()`` is given, and the filters do
            not determine exactly one shard.
        """
        if using is None and not self._is_pinned():
            try:
                route = self._route()
            except ShardKeyRequired as exc:
                # Its remedies include scatter(), which raw SQL cannot use.
                raise ShardKeyRequired(
                    f"raw() on {self.model.__name__} runs on one shard, and this query does not say"
                    " which: filter by one key before it, or name the shard with raw(…, using=…)."
                ) from exc
            if len(route.shards) != 1:
                raise ShardKeyRequired(
                    f"raw() on {self.model.__name__} runs on one shard, and this query is about"
                    f" {len(route.shards)}: filter by one key before it, or name the shard with"
                    f" raw(…, using='{route.group}_00000')."
                )
            using = route.aliases[0]
            if runtime.strategy(route.group).moves_keys:
                rows: Any = RawKeyQuerySet(raw_query, self.model, None, params, translations, using)
                rows.of_key = self
                return rows.prefetch_related(*self._prefetch_related_lookups)
        return super().raw(raw_query, params, translations, using or self._db)


def _next_rows(rows: Iterator[Any], size: int) -> list[Any]:
    return list(islice(rows, size))
