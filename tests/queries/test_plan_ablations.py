"""Ablations: plans whose shape or key lacks one part. The comparison with Django must notice each.

Each part has reads that take turns with other values, settings or classes. With plans as they are, all
results, statements and warnings are those of Django. Without the part, some are not. So no part is
superfluous, and a part that is lost is noticed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.apps import apps
from django.db.migrations.state import ProjectState
from django.db.models import F, Q
from django.test import override_settings

from sharded_orm import bound, compat, runtime
from sharded_orm.models.plans import condition_trees, declarations, instances, plan, shapes
from sharded_orm.models.querysets import first_recordings, plans, recorder
from sharded_orm.models.querysets.plans import PlannedQuerySet, without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.queries import chains
from tests.queries.conftest import DATABASES, ONE, SHARD, START, TWO
from tests.queries.test_plans_of_columns import samples as samples  # a fixture
from tests.queries.twins import World, rolled_back
from tests.relatives.sharded.models import Item
from tests.samples.models import Sample
from tests.versions import HAS_FETCH_MODES

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

Read = Callable[[], Any]
NAIVE = datetime(2026, 1, 2)


class Part(NamedTuple):
    """A part of the shape of a query, or of the key of its plan.

    :param reads: reads that differ in this part alone.
    :param remove: takes the part away.
    """

    reads: list[Read]
    remove: Callable[[pytest.MonkeyPatch], None]


def kinds_without(kind: Any, other: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Give all values for which ``kind`` returns True the kind that ``other`` has."""
    known = shapes.kind_of

    def kind_of(value: Any) -> Any:
        return known(other if kind(value) else value)

    return lambda patch: patch.setattr(shapes, "kind_of", kind_of)


def samples_of(end: Callable[[Any], Any] = list, **values: Any) -> Read:
    return lambda: end(Sample.objects.filter(owner=ONE, **values).order_by("id"))


def items_of(**values: Any) -> Read:
    return lambda: list(Item.objects.filter(**{"owner_id": ONE, **values}).order_by("pk"))


def tree_of_items(tree: Q) -> Read:
    return lambda: list(Item.objects.filter(tree, owner_id=ONE).order_by("pk"))


def page(start: int, stop: int) -> Read:
    return lambda: [row.pk for row in Item.objects.filter(owner_id=ONE).order_by("pk")[start:stop]]


def inside(block: Callable[[], Any], read: Read) -> Read:
    def call() -> Any:
        with block():
            return read()

    return call


def without_bounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_bounds", lambda field, connection: None)


def without_limits(patch: pytest.MonkeyPatch) -> None:
    statement = plan.Plan.statement
    patch.setattr(
        plan.Plan, "statement",
        lambda self, parameters, limits, connection: statement(
            self, parameters, limits and (0, limits[1]), connection
        ),
    )  # fmt: skip


def with_empty_slices(patch: pytest.MonkeyPatch) -> None:
    """Record slices such as ``[2:2]`` and ``[3:1]``, too. Django sends no statement for them."""
    known = recorder.CallRecorder.__getitem__

    def sliced(self: Any, k: Any) -> Any:
        if type(k) is not slice:
            return known(self, k)
        return self._with_recording(self._recorded()._replace(limits=(k.start, k.stop)))

    # No calls are recorded for a queryset class that has a method of another module.
    sliced.__module__ = recorder.__name__
    patch.setattr(recorder.CallRecorder, "__getitem__", sliced)


class Starred(ShardedQuerySet[Any]):
    """Django's filter() calls the method that this class overrides."""

    def _filter_or_exclude(self, negate: bool, args: Any, kwargs: Any) -> Any:
        return super()._filter_or_exclude(negate, args, {**kwargs, "stars": 1})


def without_class(patch: pytest.MonkeyPatch) -> None:
    known = recorder.first_recording
    patch.setattr(
        recorder, "first_recording",
        lambda queryset_class, model, of: known(ShardedQuerySet, model, of),
    )  # fmt: skip


def without_bound_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannedQuerySet, "_records", lambda self, using, hints: True)
    patch.setattr(PlannedQuerySet, "_may_read_by_plan", lambda self: True)


def without_aliases(patch: pytest.MonkeyPatch) -> None:
    """Read where the key is, whatever ``using()`` names."""
    patch.setattr(plans._PlanRead, "at_alias", plans._PlanRead.at_key)


def without_settings(patch: pytest.MonkeyPatch) -> None:
    kept = [forget for forget in runtime._forgetters if forget is not first_recordings.forget]
    patch.setattr(runtime, "_forgetters", kept)


def without_use_tz(patch: pytest.MonkeyPatch) -> None:
    class Known:
        USE_TZ = True

    without_settings(patch)
    patch.setattr(instances, "settings", Known)


def without_topology(patch: pytest.MonkeyPatch) -> None:
    """Let the shape remember the shard of its first read."""
    remembered = dict[str, Any]()

    def locate(group: str, key: Any) -> Any:
        return remembered.setdefault(group, runtime.locate(group, key))

    known = SimpleNamespace(config=runtime.config, strategy=runtime.strategy, locate=locate)
    patch.setattr(plans, "runtime", known)


def without_instances(patch: pytest.MonkeyPatch) -> None:
    known = shapes.Recording.filtered

    def filtered(self: Any, named: Any, *, excluded: bool = False) -> Any:
        longer = known(self, named, excluded=excluded)
        return longer and longer._replace(instances=())

    patch.setattr(shapes.Recording, "filtered", filtered)


def trees_without(position: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave one part out of the shape of each node of a ``Q``."""
    known = condition_trees._shape

    def shape(node: Q, leaves: list[Any]) -> Any:
        parts = known(node, leaves)
        return parts and (*parts[:position], None, *parts[position + 1 :])

    return lambda patch: patch.setattr(condition_trees, "_shape", shape)


def without_declarations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(declarations.Declarations, "are_current", lambda self: True)


def without_forms_of_null(patch: pytest.MonkeyPatch) -> None:
    kinds_without(lambda value: value is None, "x")(patch)


def in_other_order() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Item._meta, "ordering", ["-pk"])
        return list(Item.objects.filter(owner_id=ONE))


def with_fetch_mode(name: str) -> Any:
    from django.db.models import fetch_modes

    rows = Item.objects.filter(owner_id=ONE).fetch_mode(getattr(fetch_modes, name))
    return [(row.pk, repr(row._state.fetch_mode)) for row in rows]


def of_item(pk: int) -> Read:
    return lambda: Item.objects.filter(owner_id=ONE, parent=Item(pk=101, owner_id=pk)).count()


PARTS: dict[str, Part] = {
    "the time zone of a time": Part(
        [
            samples_of(at__lt=START),
            # distinct() needs the query, so Django prepares the value once more.
            samples_of(lambda rows: list(rows.distinct()), at__lt=NAIVE),
        ],
        kinds_without(lambda value: value == NAIVE, START),
    ),
    "None": Part([samples_of(name="a"), samples_of(name=None)], without_forms_of_null),
    "the kind of a list": Part(
        # A field of texts accepts F("name"), and makes a text of it.
        [samples_of(name__in=["a", "b"]), samples_of(name__in=[F("name")])],
        kinds_without(lambda value: type(value) is list, ["a"]),
    ),
    "booleans": Part(
        [samples_of(flag=True), samples_of(flag=False)],
        kinds_without(lambda value: value is False, True),
    ),
    "isnull": Part(
        [samples_of(name__isnull=True), samples_of(name__isnull=False)],
        kinds_without(lambda value: value is False, True),
    ),
    "the bounds of a slice": Part([page(0, 3), page(1, 3)], without_limits),
    **{
        f"empty slices: [{start}:{stop}]": Part([page(0, 3), page(start, stop)], with_empty_slices)
        for start, stop in ((0, 0), (2, 2), (3, 1))
    },
    "integers out of range": Part(
        [samples_of(number__gt=1), samples_of(number__gt=2**70)], without_bounds
    ),
    "the class of the queryset": Part(
        [
            lambda: list(Item.objects.filter(owner_id=ONE)),
            lambda: list(Starred(Item).filter(owner_id=ONE)),
        ],
        without_class,
    ),
    "bound keys": Part(
        [
            items_of(stars__gte=0),
            inside(partial(bound, owner_id=TWO), items_of(stars__gte=0)),
        ],
        without_bound_keys,
    ),
    "using()": Part(
        [
            items_of(stars__gte=0),
            lambda: list(
                Item.objects.using(SHARD[TWO]).filter(owner_id=ONE).filter(stars__gte=0)
            ),
        ],
        without_aliases,
    ),
    "the shard of a key": Part(
        [items_of(), items_of(owner_id=TWO)],
        without_topology,
    ),
    "the connector of a Q": Part(
        [
            tree_of_items(Q(stars=1) | Q(pk__lt=105)),
            tree_of_items(Q(stars=1) & Q(pk__lt=105)),
        ],
        trees_without(0),
    ),
    "NOT in a Q": Part(
        [tree_of_items(Q(stars=1) | Q(pk=104)), tree_of_items(~(Q(stars=1) | Q(pk=104)))],
        trees_without(1),
    ),
    "the shard of an instance": Part([of_item(ONE), of_item(TWO)], without_instances),
    "USE_TZ": Part(
        [
            samples_of(lambda rows: [repr(row.at) for row in rows]),
            inside(
                partial(override_settings, USE_TZ=False),
                samples_of(lambda rows: [repr(row.at) for row in rows]),
            ),
        ],
        without_use_tz,
    ),
    "the settings": Part(
        [
            inside(partial(override_settings, USE_TZ=False), samples_of(at__lt=NAIVE)),
            samples_of(lambda rows: list(rows.distinct()), at__lt=NAIVE),
        ],
        without_settings,
    ),
    "declarations": Part(
        [lambda: list(Item.objects.filter(owner_id=ONE)), in_other_order], without_declarations
    ),
}  # fmt: skip
if HAS_FETCH_MODES:
    PARTS["the fetch mode"] = Part(
        [partial(with_fetch_mode, "FETCH_ONE"), partial(with_fetch_mode, "RAISE")],
        lambda patch: patch.setattr(compat, "set_fetch_mode", lambda *args, **kwargs: None),
    )


def outcome(read: Read) -> Any:
    with warnings.catch_warnings(record=True) as warned, rolled_back():
        warnings.simplefilter("always")
        return *chains.outcome(read), [str(warning.message) for warning in warned]


def names_of_parts() -> list[Any]:
    """The parts; the converters of backends other than MySQL's read the setting ``USE_TZ`` each time."""
    of_mysql = pytest.param("USE_TZ", marks=pytest.mark.mysql_settings)
    return [of_mysql if name == "USE_TZ" else name for name in PARTS]


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("name", names_of_parts())
def test_a_part_of_a_shape(
    name: str, is_removed: bool, items: World, samples: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = PARTS[name]
    with without_plans():
        expected = [outcome(read) for read in part.reads]
    first_recordings.forget()
    if is_removed:
        part.remove(monkeypatch)
    try:
        # Twice the first read alone, so that the plan is made for it.
        for _ in range(3):
            outcome(part.reads[0])
        results = [[outcome(read) for read in part.reads] for _ in range(3)]
    finally:
        first_recordings.forget()
    assert (results != [expected] * 3) is is_removed


def test_models_of_migrations_are_not_kept(items: World) -> None:
    """They are made anew for each migration, and would never be freed."""
    model = ProjectState.from_apps(apps).apps.get_model("relatives_sharded", "Agent")
    for _ in range(4):
        assert model.objects.filter(pk=ONE).count() == 1
        assert ShardedQuerySet(Item).filter(owner_id=ONE).count() == 4
    kept = [*first_recordings._recordings, *first_recordings.templates]
    assert {known._meta.apps for _, known in kept} == {apps}
