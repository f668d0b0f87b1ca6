"""Plans of save(): the UPDATE of a stored row, as SQL that Django has compiled once.

The *shape* of a save is what its SQL depends on: the fields that are saved, and the types of their
values. A value of the type ``NoneType`` is a NULL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.db import connections
from django.db.models import Manager

from sharded_orm import runtime
from sharded_orm.models.plans.conditions import ValueForm, condition_of
from sharded_orm.models.plans.shapes import Recording, Shape, logger
from sharded_orm.models.plans.updates import PLAIN_TYPES, UpdatePlan, compile_update
from sharded_orm.models.sharding.options import ShardOptions

#: The maximum number of plans for the saves of one model. Django compiles the saves of other shapes.
MAX_SAVES = 200

_SEEN: Any = object()
#: The plans of save(), by model and shape: the names of the fields to be saved, the types of the
#: conditions' values, and those of the new values. A shape that was saved once has the value ``_SEEN``.
#: None means that Django compiles each save of the shape.
_saves: dict[Any, dict[tuple[Any, ...], Any]] = {}


class SavedTable:
    """Stands in for the model class in ``Model._save_table()``, and for its base manager.

    Django makes a queryset of the base manager for each save. A planned save does not need it, so it is
    made only if something is done with it.
    """

    __slots__ = ("_manager", "_meta")

    def __init__(self, model: Any) -> None:
        self._meta = model._meta
        self._manager = model._base_manager

    @property
    def _base_manager(self) -> SavedTable:
        return self

    @property
    def manager(self) -> Any:
        """The base manager of the model."""
        return self._manager

    def using(self, alias: str) -> SavedRows:
        return SavedRows(self._manager, alias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class SavedRows:
    """All rows of a table, as the queryset ``manager.using(alias)``, which is made when it is used."""

    __slots__ = ("alias", "manager")

    def __init__(self, manager: Any, alias: str) -> None:
        self.manager, self.alias = manager, alias

    @property
    def model(self) -> Any:
        return self.manager.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager.using(self.alias), name)


def forget() -> None:
    """Drop all plans of saves, because the settings have changed."""
    _saves.clear()


runtime.on_reset(forget)


def save_row(
    options: ShardOptions,
    rows: SavedRows,
    key: Any,
    pk: Any,
    new_values: Sequence[tuple[Any, Any, Any]],
    names: frozenset[str] | None,
) -> bool | None:
    """Update one row by a plan, and return whether a row matched.

    Return None, without sending anything, if Django must update the row. This is also so for the first
    two saves of a shape.

    :param options: the shard key and the group of the row's model.
    :param rows: all rows of the table on the row's shard.
    :param key: the value of the shard key, prepared by its field.
    :param pk: the value of the primary key.
    :param new_values: triples of a field, None, and the field's new value.
    :param names: the names of the fields to be saved; None for all fields.
    """
    if names is not None and type(names) is not frozenset:
        return None
    shape = (names, type(key), type(pk), *[type(value) for _, _, value in new_values])
    plans = _saves.get(options.model)
    plan = None if plans is None else plans.get(shape)
    if plan is None:
        _see(options.model, shape)
        return None
    if type(rows.manager) is not Manager:
        return None  # A base manager of the project may add conditions.
    connection: Any = connections[rows.alias]
    if plan is _SEEN:
        _learn_save(options, rows, (key, pk), new_values, shape, connection)
        return None
    values = [key, plan.conditions[1].target.get_prep_value(pk)]
    changed: int | None = plan.execute([value for _, _, value in new_values], values, connection)
    return None if changed is None else changed > 0


def _see(model: Any, shape: tuple[Any, ...]) -> None:
    # Do not store a model of other apps, such as a historical one: it must be possible to
    # garbage-collect it.
    if model._meta.apps is not apps or not PLAIN_TYPES.issuperset(shape[1:]):
        return
    plans = _saves.setdefault(model, {})
    if shape not in plans and len(plans) < MAX_SAVES:
        plans[shape] = _SEEN


def _learn_save(
    options: ShardOptions,
    rows: SavedRows,
    values: tuple[Any, Any],
    new_values: Sequence[tuple[Any, Any, Any]],
    shape: tuple[Any, ...],
    connection: Any,
) -> None:
    """Make the plan of a save, which Django will do this time.

    :param values: the values of the shard key and of the primary key.
    """
    plan: UpdatePlan | None = None
    try:
        plan = _plan_of_example(options, rows, values, new_values, connection)
    except Exception:
        # A field refuses a value. Django will raise the same error now, so ignore it here.
        logger.debug("save() of %s has no plan", options.model.__name__, exc_info=True)
    logger.debug(
        "save() of %s with %s: %s", options.model.__name__, shape,
        "left to Django" if plan is None else "planned",
    )  # fmt: skip
    _saves.setdefault(options.model, {})[shape] = plan


def _plan_of_example(
    options: ShardOptions,
    rows: SavedRows,
    values: tuple[Any, Any],
    new_values: Sequence[tuple[Any, Any, Any]],
    connection: Any,
) -> UpdatePlan | None:
    assert options.key is not None
    names = (options.key.attname, "pk")
    conditions, examples = [], []
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        part = condition_of(rows.model, options, name, value, is_excluded=False)
        if part is None or part.form is not ValueForm.VALUE:
            return None
        conditions.append(part)
        examples.append(part.example(part.prepared(value), number, 1))
    if None in examples:
        return None
    matching = rows.manager.using(rows.alias)
    for name, example in zip(names, examples, strict=True):
        matching = matching.filter(**{name: example})
    shape = Shape(rows.model, options, names, tuple(conditions))
    pairs = [(field, value) for field, _, value in new_values]
    return compile_update(
        shape, [(matching.query, Recording(shape, (), tuple(examples)))], pairs, connection
    )
