"""Shapes of queries: the calls that build a query, without the values of its conditions.

For example, ``Photo.objects.filter(user_id=7).order_by("-id")`` has the same shape as this query
with ``user_id=8``. Django compiles all queries of a shape to the same SQL. So the SQL is kept with
the shape, as a :class:`~sharded_orm.models.plans.plan.Plan`.

The shape of a queryset is recorded only if all of these rules hold. Other querysets are left to
Django:

- Each condition is of a kind that :mod:`sharded_orm.models.plans.conditions` knows. At most one of
  them compares with a list.
- At most one condition is an equality that determines the shard, such as ``user_id=7``. It may be
  repeated with the same value. No condition on the shard key is inside ``exclude()``, OR or NOT.
- The query selects and is ordered by columns of the model's own table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.db.models import Q

from sharded_orm.models.plans.condition_trees import (
    ConditionTree,
    demanded_conditions,
    with_values,
)
from sharded_orm.models.plans.conditions import (
    KINDS_BY_TYPE,
    Condition,
    ValueForm,
    condition_of,
    example_number,
    kind_of,
    with_repeated_key,
)
from sharded_orm.models.plans.kept_shapes import has_room
from sharded_orm.models.plans.plan import Plan
from sharded_orm.models.plans.selection import EVERYTHING, Selection
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.models.sharding.query import own_columns

if TYPE_CHECKING:
    from sharded_orm.models.plans.updates import UpdatePlan

P = TypeVar("P")

logger = logging.getLogger("sharded_orm.plans")

_TEXT = frozenset({str})
# _new(Recording, values) is faster than Recording(*values), which calls a method that is written in
# Python.
_new = tuple.__new__


class Shape:
    """A shape of queries: the calls that build a query, without their values. Thread-safe.

    The shapes of a model form a tree. For example, the shape of ``filter(user_id=…)`` has a child
    for ``filter(user_id=…).order_by("-id")``. See :attr:`children`.

    :param model: the model of the queries.
    :param options: the shard key and the group of the model; None if it is not sharded.
    :param names: the names of the conditions of the last ``filter()`` or ``exclude()``, in the
        order in which Django puts them into the SQL.
    :param conditions: the conditions of all these calls, in the same order.
    :param ordering: the arguments of ``order_by()``; None if it was not called.
    :param selection: what the read returns of each row.
    """

    __slots__ = (
        "__weakref__",
        "children",
        "conditions",
        "excludes",
        "former_uses",
        "freezes",
        "has_list",
        "model",
        "names",
        "options",
        "ordering",
        "plans",
        "prepares",
        "repeats_key",
        "seen",
        "selection",
        "shard_at",
        "updates",
        "value_iterable",
    )

    def __init__(
        self,
        model: Any,
        options: ShardOptions | None,
        names: tuple[str, ...] = (),
        conditions: tuple[Condition, ...] = (),
        ordering: tuple[str, ...] | None = None,
        selection: Selection = EVERYTHING,
    ) -> None:
        self.model = model
        self.options: Any = options
        self.names = names
        self.conditions = conditions
        self.ordering = ordering
        self.selection = selection
        #: Django's class that makes the results of values() and values_list() from rows. None if
        #: the results are model instances.
        self.value_iterable = None if selection.makes_instances else selection.iterable
        #: The position of the condition that determines the shard; None if there is no such
        #: condition.
        self.shard_at = next((i for i, part in enumerate(conditions) if part.names_shard), None)
        self.has_list = any(part.form is ValueForm.LIST for part in conditions)
        self.repeats_key = any(part.repeats is not None for part in conditions)
        self.excludes = any(part.is_excluded for part in conditions)
        #: Whether the last call has values that need special treatment. These are lists and model
        #: instances, which must be copied, because the caller may change them later, and values
        #: such as None and True, on which the SQL depends.
        self.freezes = any(
            part.form is not ValueForm.VALUE or part.takes_instance
            for part in conditions[len(conditions) - len(names) :]
        )
        #: A pair (name, field) for each condition of the last call. The field prepares the value of
        #: the condition for the database.
        self.prepares = [
            (name, part.target)
            for name, part in zip(names, conditions[len(conditions) - len(names) :], strict=True)
        ]
        #: The shapes (calls without their values) after one more call, such as filter(), keyed by
        #: the call. None means that Django handles the call.
        self.children: dict[tuple[Any, ...], Shape | None] = {}
        #: The plan (compiled SQL) of each kind of read, keyed by kind. None means that Django
        #: handles reads of this kind.
        self.plans: dict[Any, Plan | None] = {}
        #: The plan of each kind of update(), keyed by the names of the written fields and the types
        #: of their values. None means that Django handles updates of this kind.
        self.updates: dict[tuple[Any, ...], UpdatePlan | None] = {}
        #: The kinds of reads and updates that Django has done once. A plan is made at the second
        #: read of a kind, because many shapes are read only once.
        self.seen: set[Any] = set()
        #: How often the plans had been used when unused shapes were dropped last.
        self.former_uses = 0

    def __str__(self) -> str:
        names = [
            f"{'not ' if part.is_excluded else ''}{part.field.name}__{part.lookup}"
            for part in self.conditions
        ]
        chosen = "" if self.selection is EVERYTHING else f", {list(self.selection.names)} only,"
        return f"{self.model.__name__} by {names}{chosen} in the order {self.ordering}"

    def keep(self, call: tuple[Any, ...], child: Shape | None) -> None:
        """Store ``child``, the shape after ``call``, unless there is no room for it."""
        if call not in self.children and has_room():
            self.children[call] = child


class Recording(NamedTuple):
    """The calls that have built a queryset, with their values. Immutable.

    :param shape: the shape of the calls.
    :param filters: a pair for each call of ``filter()`` and ``exclude()``. The first item is True
        for ``exclude()``. The second is a dict of the keyword arguments; if the call had ``Q``
        arguments, it is one ``Q`` of all arguments.
    :param values: the values of the shape's conditions, each prepared by its field.
    :param limits: the slice as two row numbers, counted from 0: its first row, and the row after
        its last row. None if the queryset was not sliced.
    :param instances: copies of model instances in conditions such as ``filter(album=album)``. It
        contains only instances whose shard cannot be found by the value of the foreign key. The
        query must go to the shard of these instances.
    """

    shape: Shape
    filters: tuple[tuple[bool, dict[str, Any] | Q], ...] = ()
    values: tuple[Any, ...] = ()
    limits: tuple[int, int | None] | None = None
    instances: tuple[Any, ...] = ()

    def filtered(self, named: dict[str, Any], *, excluded: bool = False) -> Recording | None:
        """Return a new recording: the calls recorded here, followed by ``filter(**named)``.

        Return None if Django must handle the call, or if :meth:`learn_filter` has not seen a call
        of this shape yet. Django must also handle it if a field does not accept its value. Then
        ``filter()`` raises an error, unless a lookup was registered meanwhile that accepts the value.

        :param excluded: whether the call is ``exclude(**named)``.
        """
        shape, filters, earlier, limits, instances = self
        child = shape.children.get(_filter_call(named, excluded))
        if child is None:
            return None
        if not child.freezes:
            values = [*earlier]
            try:
                for name, field in child.prepares:
                    values.append(field.get_prep_value(named[name]))
            except Exception:
                # A field of the project may raise any error. Django raises it again.
                return None
            filters = (*filters, (excluded, named))
            longer = _new(Recording, (child, filters, tuple(values), limits, instances))
            return longer._with_one_key() if child.repeats_key else longer
        frozen = self._frozen(child, [(name, named[name]) for name in child.names])
        if frozen is None:
            return None
        copies, prepared, instances = frozen
        named = dict(zip(child.names, copies, strict=True))
        return Recording(
            child, (*filters, (excluded, named)), (*earlier, *prepared), limits, instances
        )._with_one_key()

    def _with_one_key(self) -> Recording | None:
        """Return this recording; None if two conditions require different shard keys."""
        if self.shape.repeats_key:
            for part, value in zip(self.shape.conditions, self.values, strict=True):
                if part.repeats is not None and value != self.values[part.repeats]:
                    return None
        return self

    def filtered_by_tree(self, tree: ConditionTree, *, excluded: bool = False) -> Recording | None:
        """Do what :meth:`filtered` does, for a call whose arguments contain ``Q`` objects."""
        child = self.shape.children.get((excluded, tree.shape))
        frozen = None if child is None else self._frozen(child, tree.leaves)
        if child is None or frozen is None:
            return None
        values, prepared, instances = frozen
        given = iter(values)
        root = with_values(tree.root, lambda _: next(given))
        return Recording(
            child,
            (*self.filters, (excluded, root)),
            (*self.values, *prepared),
            self.limits,
            instances,
        )._with_one_key()

    def _frozen(
        self, child: Shape, named: Sequence[tuple[str, Any]]
    ) -> tuple[list[Any], list[Any], tuple[Any, ...]] | None:
        """Copy and prepare the values of one more call, for a new recording.

        Return a tuple: copies of the values, the values prepared by their fields, and the
        ``instances`` of the new recording. Return None if Django must handle the call, also because
        a field does not accept its value.

        :param child: the shape after the call.
        :param named: pairs of the name and the value of each condition in the call.
        """
        values, prepared, instances = [], [], self.instances
        for part, (_, value) in zip(child.conditions[len(self.values) :], named, strict=True):
            if part.takes_instance and value.pk is None:
                return None  # Django raises an error for an instance that is not saved.
            values.append(part.frozen(value))
            if part.names_instance:
                instances = (*instances, values[-1])
            try:
                prepared.append(part.prepared(values[-1]))
            except Exception:
                # A field of the project may raise any error. Django raises it again.
                return None
            if part.takes_instance and prepared[-1] is None:
                return None
        return values, prepared, instances

    def still_holds(self, named: dict[str, Any]) -> bool:
        """Whether the values in ``named`` are still those that were recorded for the last call.

        ``named`` has the arguments of this call of ``filter()``. They can change after the call.
        For example, the condition of a related manager compares with a field of an instance, to
        which the project may assign another value.
        """
        count = len(self.shape.names)
        new = zip(
            self.shape.names, self.shape.conditions[-count:], self.values[-count:], strict=True
        )
        return all(
            # The copy of an instance that frozen() makes is not needed to compare its id.
            part.prepared(named[name] if part.names_instance else part.frozen(named[name])) == value
            for name, part, value in new
        )

    def learn_filter(self, named: dict[str, Any], *, excluded: bool = False) -> bool:
        """Record the shape of ``filter(**named)``, after Django has accepted this call.

        From then on, :meth:`filtered` can handle calls of this shape.

        :returns: False if the shape was known already.
        """
        names = tuple(sorted(named))  # As Q() sorts them.
        return self._learn(
            _filter_call(named, excluded), [(name, named[name], excluded) for name in names]
        )

    def learn_tree(self, tree: ConditionTree, *, excluded: bool = False) -> bool:
        """Do what :meth:`learn_filter` does, for a call whose arguments contain ``Q`` objects."""
        demanded = tree.is_demanded()
        return self._learn(
            (excluded, tree.shape),
            [
                # A row can match without meeting a condition below OR or NOT. So such a condition
                # does not determine the shard, and is treated like one of exclude().
                (name, value, excluded or not is_demanded)
                for (name, value), is_demanded in zip(tree.leaves, demanded, strict=True)
            ],
        )

    def _learn(self, call: tuple[Any, ...], named: Sequence[tuple[str, Any, bool]]) -> bool:
        """Record the shape after ``call``.

        :param named: a tuple for each condition: its name, its value, and True if a row can match
            without meeting it, as in ``exclude()``.
        :returns: False if the shape was known already.
        """
        shape = self.shape
        if call in shape.children:
            return False
        new = [
            condition_of(shape.model, shape.options, name, value, is_excluded=is_excluded)
            for name, value, is_excluded in named
        ]
        conditions = with_repeated_key(
            (*shape.conditions, *(part for part in new if part is not None))
        )
        is_plain = (
            None not in new
            and sum(part.names_shard and part.repeats is None for part in conditions) < 2
            and sum(part.form is ValueForm.LIST for part in conditions) < 2
        )
        names = tuple(name for name, _, _ in named)
        if not is_plain:
            unknown = [name for name, part in zip(names, new, strict=True) if part is None]
            why = f"no plan compares {unknown} so" if unknown else "of several keys or lists"
            logger.debug("%s by %s: left to Django, %s", shape.model.__name__, [*names], why)
        longer = (names, conditions, shape.ordering, shape.selection)
        shape.keep(call, Shape(shape.model, shape.options, *longer) if is_plain else None)
        return True

    def ordered(self, names: tuple[Any, ...]) -> Recording | None:
        """Return a new recording: the calls recorded here, followed by ``order_by(*names)``.

        Return None if Django must handle the call, or if :meth:`learn_order` has not seen it yet.
        """
        child = self.shape.children.get(("order_by", *names)) if _are_texts(names) else None
        return None if child is None else self._of_shape(child)

    def learn_order(self, names: tuple[Any, ...]) -> None:
        """Record the shape of ``order_by(*names)``, after Django has accepted this call."""
        shape = self.shape
        columns = own_columns(shape.model)
        if not _are_texts(names) or any(name.removeprefix("-") not in columns for name in names):
            return
        ordered = (shape.names, shape.conditions, names, shape.selection)
        shape.keep(("order_by", *names), Shape(shape.model, shape.options, *ordered))

    def selected(self, selection: Selection) -> Recording | None:
        """Return a new recording: the calls recorded here, followed by a call such as ``values()``.

        Return None if Django must handle the call, or if :meth:`learn_selection` has not seen it.
        """
        if not _are_texts(selection.names):
            return None
        child = self.shape.children.get(("select", *selection))
        return None if child is None else self._of_shape(child)

    def _of_shape(self, shape: Shape) -> Recording:
        # Do the same as _replace(shape=shape), which takes six times as long.
        return _new(Recording, (shape, *self[1:]))

    def sliced(self, limits: tuple[int, int]) -> Recording:
        """Return a new recording: the calls recorded here, followed by a slice."""
        return _new(Recording, (self.shape, self.filters, self.values, limits, self.instances))

    def learn_selection(self, selection: Selection) -> None:
        """Record the shape of a call such as ``values()``, after Django has accepted this call."""
        shape = self.shape
        if shape.selection is not EVERYTHING or not selection.is_known(shape.model):
            return
        selected = (shape.names, shape.conditions, shape.ordering, selection)
        shape.keep(("select", *selection), Shape(shape.model, shape.options, *selected))

    def example(self, length: int = 1) -> Recording | None:
        """Return a copy of this recording without its slice, with made-up values that all differ.

        Because the values differ, each parameter of the compiled SQL shows to which condition it
        belongs. Only two conditions on the same shard key, one of which repeats the other, have the
        same value. Return None if a value has an unknown type, because the SQL may depend on this
        value.

        :param length: the number of values in a list.
        """
        conditions, values = self.shape.conditions, list[Any]()

        def made_up(given: Any) -> Any:
            position = len(values)
            part = conditions[position]
            values.append(part.example(self.values[position], example_number(position), length))
            return given if part.form is ValueForm.FIXED else values[-1]

        filters: list[tuple[bool, dict[str, Any] | Q]] = []
        for excluded, given in self.filters:
            if isinstance(given, Q):
                filters.append((excluded, with_values(given, made_up)))
            else:
                filters.append((excluded, {name: made_up(given[name]) for name in sorted(given)}))
        if any(value is None for value in values):
            return None
        return Recording(self.shape, tuple(filters), tuple(values))

    def replay(
        self,
        query: Any,
        *,
        after: Recording | None = None,
        excludes: bool = True,
        selects: bool = True,
    ) -> None:
        """Apply the recorded calls to ``query``, a new query of the model.

        :param after: the first of the recorded calls, if ``query`` was built by them already.
        :param excludes: whether to apply all conditions. If False, leave out calls of ``exclude()``
            and conditions below OR or NOT, which are not needed to find the shard.
        :param selects: whether to select only what the recorded calls select.
        """
        done, ordering, selection, limits = 0, None, EVERYTHING, None
        if after is not None:
            done, limits = len(after.filters), after.limits
            ordering, selection = after.shape.ordering, after.shape.selection
        for excluded, given in self.filters[done:]:
            condition = given if isinstance(given, Q) else Q(**given)
            if excludes:
                query.add_q(~condition if excluded else condition)
            elif not excluded:
                query.add_q(demanded_conditions(condition))
        if self.shape.ordering is not ordering:
            query.clear_ordering(force=True, clear_default=False)
            query.add_ordering(*(self.shape.ordering or ()))
        if selects and self.shape.selection is not selection:
            self.shape.selection.apply(query)
        if self.limits is not None and limits is None:
            query.set_limits(*self.limits)


def plan_of(what: str, make: Callable[[], P | None]) -> P | None:
    """Call ``make`` to make a plan, log whether it has made one, and return the plan or None.

    None means that Django must handle all statements of this kind. An error in ``make`` counts as
    None. The caller must let Django handle the present statement.

    :param what: a description of the statements for the log.
    """
    plan = None
    try:
        plan = make()
    except Exception:
        # A field or the backend has refused a value. Ignore the error, because the caller lets
        # Django handle the statement. If a made-up value was refused, Django's statement succeeds.
        # If a value of the caller was refused, Django raises the same error.
        logger.debug("%s has no plan", what, exc_info=True)
    logger.debug("%s: %s", what, "left to Django" if plan is None else "planned")
    return plan


def _filter_call(named: dict[str, Any], excluded: bool) -> tuple[Any, ...]:
    kinds = tuple(map(type, named.values()))
    if not KINDS_BY_TYPE.issuperset(kinds):
        kinds = tuple(map(kind_of, named.values()))
    return (excluded, *named, *kinds)


def _are_texts(names: tuple[Any, ...]) -> bool:
    return set(map(type, names)) <= _TEXT
