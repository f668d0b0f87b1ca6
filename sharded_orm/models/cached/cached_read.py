"""One read of a queryset through the cache: whether it is one, under which names, what it gives."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

from django.db.models.query import ModelIterable

from sharded_orm import runtime
from sharded_orm.cache import request_cache
from sharded_orm.cache.guards import digest
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import HIT, MISS, CacheRequest, ListRequest, ObjectRequest
from sharded_orm.cache.values import Row
from sharded_orm.models.cached.hydration import InstanceFactory, connected_to
from sharded_orm.models.cached.lookup_plan import LookupPlan
from sharded_orm.models.cached.query_fingerprint import asked, compiled

#: What is asked for.
ROWS, COUNT, EXISTS = "rows", "count", "exists"


class CachedRead:
    """A queryset that is to be read through the cache, now."""

    __slots__ = (
        "alias", "entries", "fill", "key", "kind", "level", "maker", "plan", "queryset", "want",
    )  # fmt: skip

    def __init__(
        self,
        queryset: Any,
        plan: LookupPlan,
        alias: str,
        maker: InstanceFactory,
        kind: str,
        want: CacheRequest,
        fill: bool,
    ) -> None:
        self.queryset = queryset
        self.plan = plan
        self.alias = alias
        self.maker = maker
        self.kind = kind
        self.want = want
        self.fill = fill
        self.level = request_cache.current()
        if self.level is not None:
            scope = want.scope
            self.entries: dict[str, Any] = self.level.home(scope.guards[scope.home])
            if isinstance(want, ObjectRequest):
                self.key = want.name
            elif isinstance(want, ListRequest):
                self.key = f"{scope.guards[-1]} {want.query}"

    def remembered(self) -> Any:
        """The result as level 1 has it, or None."""
        if self.level is None or self.queryset._for_write:
            # What is to be deleted, or created if it is missing, is told by now, not by then.
            return None
        found = self.entries.get(self.key)
        return self._instances(found) if found is not None and self.kind is ROWS else found

    def result(self, rows: list[Row], *, keep: bool) -> list[Any]:
        """Instances; ``rows`` are values if the maker has ``decoded``."""
        if keep and self.level is not None:
            want, entries = self.want, self.entries
            entries[self.key] = rows
            self.level.count(1 + len(rows))
            if isinstance(want, ListRequest) and want.object_names is not None:
                # Its objects, for whoever asks for one by its key.
                entries.update(zip(want.object_names, ([row] for row in rows), strict=True))
        return self._instances(rows)

    def _instances(self, rows: list[Row]) -> list[Any]:
        maker = self.maker
        instances = maker.instances(rows if maker.decoded is not None else maker.values(rows))
        known = self.queryset._known_related_objects
        if known:
            _set_known(self.queryset.model, known, instances)
        return instances

    def keep_scalar(self, value: int) -> int:
        if self.level is not None:
            self.entries[self.key] = value
            self.level.count(1)
        return value


def _set_known(model: Any, known: dict[Any, Any], instances: list[Any]) -> None:
    # As ModelIterable does it.
    for field, objects in known.items():
        names = [
            field.attname if name == "self" else model._meta.get_field(name).attname
            for name in field.from_fields
        ]
        identity = operator.attrgetter(*names)
        for instance in instances:
            if field.is_cached(instance):
                continue
            try:
                related = objects[identity(instance)]
            except KeyError:
                continue  # May happen in qs1 | qs2.
            setattr(instance, field.name, related)


def prepare(queryset: Any, plan: LookupPlan, kind: str) -> CachedRead | None:
    """How to read ``queryset`` through the cache; None: it is not cached."""
    query = queryset.query
    if query.select_for_update:
        # Whoever locks rows wants to see them as they are, here and in what follows.
        request_cache.forget()
        return None
    if queryset._uncached or request_cache.is_uncached():
        return None
    if kind is ROWS and (
        queryset._iterable_class is not ModelIterable or queryset._fields is not None
    ):
        return None
    found = asked(query, ordered=kind is ROWS)
    if isinstance(found, str):
        return None
    cached = plan.cached
    alias = queryset.db
    key: str | None = None
    if plan.key_column is not None:
        values = found.equal.get(plan.key_column, ())
        if len(values) != 1:
            return None
        key = cached.key_token(values[0])
        if key is None:
            return None
        if queryset._names_alias():
            assert cached.options is not None
            shard = runtime.locate(cached.options.group, values[0])
            if shard is None or shard.alias != alias:
                return None
    elif not cached.home_alias_ok(alias):
        return None
    connected = connected_to(alias)
    if connected is None:
        return None
    fill = connected.may_fill()
    if fill is None:
        return None
    place = cached.place(alias)
    maker = connected.maker(plan)
    want: CacheRequest
    if kind is ROWS and found.only_equal and found.equal.keys() == plan.object_columns:
        equal = found.equal
        pk = _one_pk(plan, equal)
        if pk is None:
            return None
        want = ObjectRequest(cached.scope(place, key), maker, connected, pk)
    else:
        text = found.text
        if text is None:
            text = compiled(query, alias)
            if text is None:
                return None
        isolate = None
        if plan.isolate_column is not None:
            values = found.equal.get(plan.isolate_column, ())
            if len(values) == 1:
                isolate = cached.isolate_token(values[0])
        want = ListRequest(
            cached.scope(place, key, isolate),
            maker,
            connected,
            digest(text, maker.fingerprint, kind),
            scalar=kind is not ROWS,
        )
    return CachedRead(queryset, plan, alias, maker, kind, want, fill)


def _one_pk(plan: LookupPlan, equal: dict[str, list[Any]]) -> str | None:
    values = [equal[column] for column in plan.pk_columns]
    if any(len(each) != 1 for each in values):
        return None
    first = values[0][0]
    if len(values) == 1:
        return plan.cached.pk_token(first)
    return plan.cached.pk_token(tuple(each[0] for each in values))


def _rows_of(query: Any, alias: str) -> list[Row]:
    """What the database says, as the driver gives it."""
    return list(chain.from_iterable(query.get_compiler(using=alias).execute_sql()))


def answer(read: CachedRead, reader: Reader) -> list[Any]:
    """The instances of a read that was made: from the cache, or the database."""
    want = read.want
    if want.outcome == HIT:
        assert want.rows is not None
        return read.result(want.rows, keep=True)
    maker = read.maker
    rows = _rows_of(read.queryset.query, read.alias)
    values = rows if maker.decoded is None else maker.values(rows)
    may_fill = want.outcome == MISS and read.fill
    if may_fill and want.state is not None:
        _fill(read, reader, rows, values if maker.decoded is not None else maker.values(rows))
    return read.result(values, keep=may_fill)


def _fill(read: CachedRead, reader: Reader, rows: Sequence[Row], values: Sequence[Row]) -> None:
    plan, want = read.plan, read.want
    cached, position = plan.cached, plan.key_position
    pks = []
    for row in values:
        pk = plan.pk_token(row)
        if pk is None:
            return
        # What the database takes for equal, names in the cache may not.
        if position is not None and cached.key_token(row[position]) != want.scope.key:
            return
        pks.append(pk)
    reader.fill([(want, pks, rows)])
