"""Shapes of queries: the calls that build a query, without the values of its conditions.

``Photo.objects.filter(user_id=7).order_by("-id")`` and the same with ``user_id=8`` have one shape.
Django compiles all queries of a shape to the same SQL, so the SQL is kept with the shape, as a
:class:`~sharded_orm.models.plans.plan.Plan`.

The shape of a queryset is recorded only if all of these rules hold. Other querysets are left to
Django:

- Each condition compares a column of the model's own table with an ``int``, a ``str`` or a
  ``UUID``. The conditions are joined by AND.
- At most one condition is an equality that determines the shard.
- The query is ordered by columns of the model's own table, if at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.db.models import GeneratedField, GenericIPAddressField, JSONField, Q
from django.db.models.constants import LOOKUP_SEP

from sharded_orm.models.plans.plan import MODULES_OF_LOOKUPS, Plan
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.models.sharding.query import own_columns

if TYPE_CHECKING:
    from sharded_orm.models.plans.updates import UpdatePlan

logger = logging.getLogger("sharded_orm.plans")

#: The maximum number of shapes that a process keeps. If a shape is not kept, Django compiles each of
#: its queries.
MAX_SHAPES = 10_000

# The types of values whose SQL does not depend on the value. Subclasses, such as bool or
# IntegerChoices, are excluded. Each function makes a value of its type; for different numbers it
# makes different values.
_EXAMPLES: dict[type, Callable[[int], Any]] = {
    int: int,
    str: str,
    UUID: lambda number: UUID(int=number),
}
_LOOKUPS = frozenset({"exact", "gt", "gte", "lt", "lte"})
# Fields of other packages are excluded, because the values of such a field may change the SQL.
_MODULES_OF_FIELDS = ("django.db.models.fields", "sharded_orm.models.fields.")


class Condition(NamedTuple):
    """A condition of a query: a column is compared with a value.

    :param field: the field of the column.
    :param target: the field that prepares the value: ``field`` itself, or for a foreign key the
        field to which it refers.
    :param lookup: the name of the comparison, such as ``"exact"``.
    :param names_shard: whether the condition determines the shard: it is an equality with the shard
        key, or with an id that contains the number of its shard.
    """

    field: Any
    target: Any
    lookup: str
    names_shard: bool


class Shape:
    """A shape of queries, as a node of a tree. A child is the shape after one more call.

    A shape is the calls that build a query, without their values.

    Thread-safe.

    :param options: the shard key and the group of the model.
    :param names: the names of the conditions of the last ``filter()``, in the order in which Django
        puts them into the SQL.
    :param conditions: the conditions of all calls of ``filter()``, in the same order.
    :param ordering: the arguments of ``order_by()``; None if it was not called.
    """

    __slots__ = (
        "children",
        "conditions",
        "names",
        "options",
        "ordering",
        "plans",
        "seen",
        "shard_at",
        "updates",
    )

    def __init__(
        self,
        options: ShardOptions,
        names: tuple[str, ...] = (),
        conditions: tuple[Condition, ...] = (),
        ordering: tuple[str, ...] | None = None,
    ) -> None:
        self.options = options
        self.names = names
        self.conditions = conditions
        self.ordering = ordering
        #: The position of the condition that determines the shard; None if there is no such
        #: condition.
        self.shard_at = next((i for i, part in enumerate(conditions) if part.names_shard), None)
        #: The shapes (calls without their values) after one more call, such as filter(), keyed by
        #: the call. None means that Django handles the call.
        self.children: dict[tuple[Any, ...], Shape | None] = {}
        #: The plan (compiled SQL) of each kind of read, keyed by kind. None means that Django
        #: handles reads of this kind.
        self.plans: dict[str, Plan | None] = {}
        #: The plan of each kind of update(), keyed by the names of the written fields and the types
        #: of their values. None means that Django handles updates of this kind.
        self.updates: dict[tuple[Any, ...], UpdatePlan | None] = {}
        #: The kinds of reads and updates that Django has done once. A plan is made at the second
        #: read of a kind, because many shapes are read only once.
        self.seen: set[str | tuple[Any, ...]] = set()

    def __str__(self) -> str:
        names = [f"{part.field.name}__{part.lookup}" for part in self.conditions]
        return f"{self.options.model.__name__} by {names} in the order {self.ordering}"


class Recording(NamedTuple):
    """The calls that have built a queryset, with their values. Immutable.

    :param shape: the shape of the calls.
    :param filters: the keyword arguments of each call of ``filter()``.
    :param values: the values of the shape's conditions, each prepared by its field.
    :param limits: the slice as two row numbers, counted from 0: its first row, and the row after
        its last row. None if the queryset was not sliced.
    """

    shape: Shape
    filters: tuple[dict[str, Any], ...] = ()
    values: tuple[Any, ...] = ()
    limits: tuple[int, int | None] | None = None

    def filtered(self, named: dict[str, Any]) -> Recording | None:
        """Return a new recording: the calls recorded here, followed by ``filter(**named)``.

        Return None if Django must handle the call, or if :meth:`learn_filter` has not seen a call
        of this shape yet. If a field does not accept its value, raise the field's exception, as
        ``filter()`` does.
        """
        child = self.shape.children.get(_filter_call(named))
        if child is None:
            return None
        new = child.conditions[len(self.values) :]
        prepared = [
            condition.target.get_prep_value(named[name])
            for name, condition in zip(child.names, new, strict=True)
        ]
        return Recording(child, (*self.filters, named), (*self.values, *prepared))

    def learn_filter(self, named: dict[str, Any]) -> None:
        """Record the shape of ``filter(**named)``, which Django has accepted, for :meth:`filtered`."""
        shape, call = self.shape, _filter_call(named)
        if call in shape.children or not has_room():
            return
        names = tuple(sorted(named))  # As Q() sorts them.
        new = [condition_of(shape.options, name, named[name]) for name in names]
        conditions = (*shape.conditions, *(part for part in new if part is not None))
        is_plain = None not in new and sum(part.names_shard for part in conditions) < 2
        shape.children[call] = (
            Shape(shape.options, names, conditions, shape.ordering) if is_plain else None
        )

    def ordered(self, names: tuple[Any, ...]) -> Recording | None:
        """Return a new recording: the calls recorded here, followed by ``order_by(*names)``.

        Return None if Django must handle the call, or if :meth:`learn_order` has not seen it yet.
        """
        child = self.shape.children.get(("order_by", *names)) if _are_texts(names) else None
        return None if child is None else self._replace(shape=child)

    def learn_order(self, names: tuple[Any, ...]) -> None:
        """Record the shape of ``order_by(*names)``, which Django has accepted, for :meth:`ordered`."""
        shape = self.shape
        columns = own_columns(shape.options.model)
        if not _are_texts(names) or any(name.removeprefix("-") not in columns for name in names):
            return
        if ("order_by", *names) not in shape.children and has_room():
            ordered = Shape(shape.options, shape.names, shape.conditions, names)
            shape.children["order_by", *names] = ordered

    def example(self) -> Recording | None:
        """Return a copy of this recording without its slice, with made-up values that all differ.

        As no two values are equal, each parameter of the compiled SQL shows to which condition it
        belongs. Return None if a prepared value has a type that is not in ``_EXAMPLES``, because
        the SQL may depend on such a value.
        """
        filters: list[dict[str, Any]] = []
        values: list[Any] = []
        for named in self.filters:
            example = {}
            for name in sorted(named):
                example[name] = example_of(self.values[len(values)], len(values) + 1)
                if example[name] is None:
                    return None
                values.append(example[name])
            filters.append(example)
        return Recording(self.shape, tuple(filters), tuple(values))

    def replay(self, query: Any) -> None:
        """Apply the recorded calls to ``query``, a new query of the model."""
        for named in self.filters:
            query.add_q(Q(**named))
        if self.shape.ordering is not None:
            query.clear_ordering(force=True, clear_default=False)
            query.add_ordering(*self.shape.ordering)
        if self.limits is not None:
            query.set_limits(*self.limits)


def example_of(value: Any, number: int) -> Any:
    """Return a made-up value of the type of ``value``, which is another one for each number.

    Return None if the SQL may depend on a value of this type.
    """
    make = _EXAMPLES.get(type(value))
    return None if make is None else make(number)


def _filter_call(named: dict[str, Any]) -> tuple[Any, ...]:
    return (*named, *map(type, named.values()))


def _are_texts(names: tuple[Any, ...]) -> bool:
    return all(type(name) is str for name in names)


def condition_of(options: ShardOptions, name: str, value: Any) -> Condition | None:
    """Return the condition ``name=value`` of a ``filter()``; None if Django must handle it."""
    column, _, lookup = name.partition(LOOKUP_SEP)
    lookup = lookup or "exact"
    field = own_columns(options.model).get(column)
    if field is None and lookup == "exact":
        field = _foreign_key(options.model, column)
    if field is None or type(value) not in _EXAMPLES or lookup not in _LOOKUPS:
        return None
    target = field.target_field if field.is_relation else field
    if not all(type(part).__module__.startswith(_MODULES_OF_FIELDS) for part in (field, target)):
        return None
    if isinstance(target, GeneratedField | JSONField | GenericIPAddressField):
        # Django must handle the condition: the SQL may depend on the value's type, or the value may
        # be prepared by a field of another package.
        return None
    if field.get_lookup(lookup).__module__ not in MODULES_OF_LOOKUPS:
        return None  # Leave a custom lookup of a project to Django, because it may refuse values.
    # The next statements recognise an equality that determines the shard, by the same rule as
    # plain_key() in sharded_orm.models.querysets.route.
    names_shard = field is options.key or (
        field.column in options.columns and options.names_shard(field)
    )
    return Condition(field, target, lookup, names_shard and lookup == "exact")


def _foreign_key(model: Any, name: str) -> Any:
    """Return the foreign key of the model's own table whose name or attname is ``name``."""
    meta = model._meta
    for field in meta.concrete_fields:
        if (
            field.is_relation
            and name in (field.name, field.attname)
            and field.model._meta.concrete_model is meta.concrete_model
            and len(field.foreign_related_fields) == 1
            and not field.target_field.is_relation
        ):
            return field
    return None


_shapes = 0


def forget() -> None:
    """Reset the number of kept shapes of queries to 0, because all shapes were dropped."""
    global _shapes
    _shapes = 0


def has_room() -> bool:
    """Count a new shape of queries, and return whether it may be kept: False if there are too many."""
    global _shapes
    if _shapes >= MAX_SHAPES:
        if _shapes == MAX_SHAPES:
            _shapes += 1
            logger.warning(
                "Queries of %d shapes were recorded. Django compiles queries of further shapes each"
                " time. Probably a program takes the names of conditions from data.",
                MAX_SHAPES,
            )
        return False
    _shapes += 1
    return True
