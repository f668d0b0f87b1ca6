"""Reads querysets through the cache without building their queries, if they have a plan.

A plan is SQL that was compiled once for all queries of a shape, that is, for all queries that
differ only in the values of their conditions. The requests to the cache for these queries differ
only in these values, too. So a :class:`RequestPlan` is made once, from one query of the shape. A
later read only fills the values of its conditions into the prepared request.

The names of cache entries are the same as those that
:func:`sharded_orm.models.cached.cached_read.prepare` makes. So processes with and without the plan
share the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sharded_orm.cache import request_cache
from sharded_orm.cache.guards import digest
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import ListRequest, ObjectRequest
from sharded_orm.models.cached.cached_read import (
    COUNT,
    EXISTS,
    ROWS,
    CachedRead,
    answer,
    instances_of,
    rows_through_cache,
    value_through_cache,
)
from sharded_orm.models.cached.connection_state import ConnectionUse, connection_use
from sharded_orm.models.cached.lookup_plan import LookupPlan, plan_of
from sharded_orm.models.cached.query_fingerprint import (
    IMMUTABLE,
    QueryFingerprint,
    fingerprint_of,
)
from sharded_orm.models.cached.queryset import current_reader
from sharded_orm.models.plans import plan as kinds
from sharded_orm.models.plans.conditions import ValueForm
from sharded_orm.models.plans.selection import EVERYTHING

if TYPE_CHECKING:
    from sharded_orm.models.plans.shapes import Recording

# What the cache stores for each kind of read.
_STORED = {kinds.ROWS: ROWS, kinds.GET: ROWS, kinds.EXISTS: EXISTS, kinds.COUNT: COUNT}
# The types of condition values from which the text of a query can be made, because their repr()
# shows the whole value. A tuple is one of them, because a recording keeps the list of a condition
# such as __in as a tuple.
_SHOWN = IMMUTABLE | {tuple}
# An item of RequestPlan._places, which lists what to fill into the text of a query. This item
# means: fill in the alias of the shard. It occurs if a condition compares with a model instance.
_SHARD = -1


class LeftToDjango(Exception):
    """Raised if queries are cached, but a :class:`RequestPlan` cannot make their requests.

    Each request must then be made from a query that Django has built.
    """


class RequestPlan:
    """Makes the requests to the cache for queries that differ only in their values.

    Immutable, thread-safe. Implements :class:`~sharded_orm.models.plans.plan.ReadCache`, through
    which the plan of these queries uses the cache.

    :param plan: the key fields of the model.
    :param kind: :data:`ROWS`, :data:`COUNT` or :data:`EXISTS`.
    :param fingerprint: the fingerprint of one of the queries, without limits.
    :param recording: the calls that have built this query.
    :raises LeftToDjango: it is unclear how the names of entries depend on the values.
    """

    __slots__ = ("_isolate_at", "_key_at", "_kind", "_pk_value", "_places", "_plan", "_text")

    def __init__(
        self,
        plan: LookupPlan,
        kind: str,
        fingerprint: QueryFingerprint,
        recording: Recording,
    ) -> None:
        equal = fingerprint.equal
        positions: dict[Any, int] = {}
        for position, part in enumerate(recording.shape.conditions):
            if part.lookup == "exact" and not part.is_excluded and part.repeats is None:
                if part.field.column in positions:
                    raise LeftToDjango
                positions[part.field.column] = position
        if positions.keys() != equal.keys() or any(len(known) != 1 for known in equal.values()):
            raise LeftToDjango
        self._plan = plan
        self._kind = kind
        self._key_at = None if plan.key_column is None else positions[plan.key_column]
        self._isolate_at = positions.get(plan.isolate_column)
        # Returns the primary key in the values of the conditions: a tuple if the key is composite.
        # None if the queries are not by primary key.
        self._pk_value: Callable[[Sequence[Any]], Any] | None = None
        if kind is ROWS and fingerprint.only_equal and equal.keys() == plan.object_columns:
            self._pk_value = itemgetter(*[positions[column] for column in plan.pk_columns])
        self._text, self._places = _format_of(fingerprint, recording)

    def is_current(self) -> bool:
        """See :meth:`ReadCache.is_current`."""
        return plan_of(self._plan.model) is self._plan

    def read(
        self,
        queryset: Any,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
        query_database: Callable[[], Any],
    ) -> Any:
        """See :meth:`ReadCache.read`. Costs the same round trips as a read without a plan."""
        reader = current_reader()
        if reader is None:
            return kinds.UNREAD
        if self._pk_value is not None and not (limits and limits[0]):
            pk = self._plan.cached.pk_token(self._pk_value(values))
            if pk is None:
                return kinds.UNREAD
            return self._read_object(queryset, values, pk, connection, query_database, reader)
        read = self.prepare(queryset, values, limits, connection, query_database)
        if read is None:
            return kinds.UNREAD
        if self._kind is ROWS:
            return rows_through_cache(read, reader)
        read.query_database = lambda: int(query_database() or 0)
        return value_through_cache(read, reader)

    def _read_object(
        self,
        queryset: Any,
        values: Sequence[Any],
        pk: str,
        connection: Any,
        query_database: Callable[[], Any],
        reader: Reader,
    ) -> Any:
        """Do :meth:`read` for a query by primary key, which finds at most one row.

        If the process has read the row before and remembers it, this takes less time than
        :meth:`prepare`.

        :param pk: the token of the primary key in ``values``, its form in names of entries.
        """
        scope_and_use = self._scope_of(queryset, values, connection)
        if scope_and_use is None:
            return kinds.UNREAD
        scope, use = scope_and_use
        level = request_cache.current()
        if level is None:
            found = reader.read_object(scope, use.factory, use.state, pk, to_fill=use.fill)
            if not isinstance(found, ObjectRequest):
                return instances_of(use.factory, [found], queryset)
            request = found
        else:
            request = ObjectRequest(scope, use.factory, use.state, pk)
        read = CachedRead(queryset, self._plan, use, self._kind, request, level, query_database)
        return answer(read, reader) if level is None else rows_through_cache(read, reader)

    def _scope_of(
        self, queryset: Any, values: Sequence[Any], connection: Any
    ) -> tuple[Scope, ConnectionUse] | None:
        """Return the scope of a read, and how its connection may use the cache.

        The scope (a set of rows) is that of the shard key in ``values``; for a global model, it is
        the whole table. Return None if the cache must not be used.
        """
        plan = self._plan
        cached = plan.cached
        if queryset._uncached or request_cache.is_uncached():
            return None
        key: str | None = None
        if self._key_at is not None:
            key = cached.key_token(values[self._key_at])
            if key is None:
                return None
        elif not cached.caches_alias(connection.alias):
            return None
        use = connection_use(plan, connection)
        return None if use is None else (cached.scope(cached.place(use.alias), key), use)

    def prepare(
        self,
        queryset: Any,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
        query_database: Callable[[], Any],
    ) -> CachedRead | None:
        """See :meth:`ReadCache.prepare`."""
        plan = self._plan
        scope_and_use = self._scope_of(queryset, values, connection)
        if scope_and_use is None:
            return None
        scope, use = scope_and_use
        request: ObjectRequest | ListRequest
        if self._pk_value is not None and not (limits and limits[0]):
            pk = plan.cached.pk_token(self._pk_value(values))
            if pk is None:
                return None
            request = ObjectRequest(scope, use.factory, use.state, pk)
        else:
            if not _SHOWN.issuperset(map(type, values)):
                return None
            if self._isolate_at is not None:
                isolate = plan.cached.isolate_token(values[self._isolate_at])
                scope = plan.cached.scope(scope.place, scope.key, isolate)
            request = ListRequest(
                scope,
                use.factory,
                use.state,
                digest(
                    # Leave the limits out for exists() and count(). The text of such a query has
                    # none, even though the SQL of exists() has a LIMIT.
                    self._text_of(values, limits if self._kind is ROWS else None, use.alias),
                    use.factory.fingerprint,
                    self._kind,
                ),
                scalar=self._kind is not ROWS,
            )
        level = request_cache.current()
        return CachedRead(queryset, plan, use, self._kind, request, level, query_database)

    def _text_of(
        self, values: Sequence[Any], limits: tuple[int, int | None] | None, alias: str
    ) -> str:
        """Return the text that identifies a query, as in :class:`QueryFingerprint`."""
        shown: list[Any] = [
            alias if position is _SHARD else values[position] for position in self._places
        ]
        shown = [list(value) if type(value) is tuple else value for value in shown]
        return self._text % (*map(repr, shown), *(limits or (0, None)))


class _Place:
    """Takes the place of a value in the tuples from which repr() makes the text of a query.

    Its own repr() is a mark, which :func:`_format_of` replaces by ``%s``.
    """

    def __repr__(self) -> str:
        return "\0"


def _format_of(fingerprint: QueryFingerprint, recording: Recording) -> tuple[str, list[int]]:
    """Return a %-format for the texts of all queries of a shape, and a list of what to fill in.

    The list has an item for each ``%s``, except the last two, which are for the limits of the
    query. An item is the position of a condition, whose value must be filled in, or ``_SHARD`` for
    the alias of the shard.
    """
    values, places = recording.values, list[int]()
    # The conditions of the shape and those in the fingerprint both have the order of the parameters
    # in the SQL. So they can be matched one by one.
    variable = [
        position
        for position, part in enumerate(recording.shape.conditions)
        if part.form is not ValueForm.FIXED
    ]
    following = iter(variable)

    def replaced(part: Any) -> Any:
        if type(part[1]) is bool:
            connector, negated, parts = part
            return connector, negated, list(map(replaced, parts))
        if len(part) == 2:
            places.append(_SHARD)
            return part[0], _Place()
        lookup, column, value = part
        if value is None or type(value) is bool:
            return part  # The value is a part of the shape.
        position = next(following, None)
        compared = tuple(value) if type(value) is list else value
        if position is None or compared != values[position]:
            raise LeftToDjango
        places.append(position)
        return lookup, column, _Place()

    conditions = replaced(fingerprint.conditions) if fingerprint.conditions else ()
    if next(following, None) is not None:
        raise LeftToDjango
    text = repr((conditions, fingerprint.order, _Place(), _Place()))
    return text.replace("%", "%%").replace("\0", "%s"), places


def request_plan(kind: str, query: Any, recording: Recording) -> RequestPlan | None:
    """Return the :class:`RequestPlan` of all queries of a shape; None if they are never cached.

    :param kind: the kind of read, see :mod:`sharded_orm.models.plans.plan`.
    :param query: a new query of the model. This function adds conditions to it.
    :param recording: the calls that build one of the queries.
    :raises LeftToDjango: the queries are cached, but this class cannot make their requests.
    """
    plan = plan_of(recording.shape.model)
    if plan is None or recording.shape.selection is not EVERYTHING:
        return None
    # Make the plan from an example, a recording with made-up values. They all differ, so each value
    # in the text shows to which condition it belongs. But an example contains no model instances.
    # If a condition compares with an instance, the text must show the instance's shard, so use the
    # recording itself.
    example = recording._replace(limits=None) if recording.instances else recording.example()
    if example is None:
        raise LeftToDjango
    example.replay(query)
    fingerprint = fingerprint_of(query, ordered=kind == kinds.ROWS)
    if isinstance(fingerprint, str):
        return None
    if plan.key_column is not None and plan.key_column not in fingerprint.equal:
        return None
    if fingerprint.conditions is None:
        raise LeftToDjango
    return RequestPlan(plan, _STORED[kind], fingerprint, example)
