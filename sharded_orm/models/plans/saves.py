"""Plans of save(): the UPDATE of a stored row, as SQL that Django has compiled once.

Saves of the same fields, with values of the same types, have the same SQL. The *shape* of a save
contains these fields and types, and each shape can have a plan. ``NoneType`` counts as a type,
because the SQL may be another one if a value is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.apps import apps
from django.db import connections
from django.db.models import Manager

from sharded_orm import runtime
from sharded_orm.backends.write_hooks import compiled_update
from sharded_orm.backends.write_hooks.followers import is_followed
from sharded_orm.models.plans.conditions import ValueForm, condition_of
from sharded_orm.models.plans.declarations import Declarations
from sharded_orm.models.plans.shapes import Recording, Shape, plan_of
from sharded_orm.models.plans.updates import PLAIN_TYPES, UpdatePlan, compile_update, may_warn
from sharded_orm.models.sharding.options import ShardOptions

#: The maximum number of plans for the saves of one model. Django compiles the saves of other shapes.
MAX_SAVES = 200

_SEEN: Any = object()
#: The plans of save(), by model and shape. A shape consists of the number of conditions, the names
#: of the fields to be saved, the types of the conditions' values, and the types of the new values.
#: The first save of a shape stores ``_SEEN``, the second makes the plan. None means that no plan
#: can be made, so Django compiles each save.
_saves: dict[Any, dict[tuple[Any, ...], Any]] = {}


class SavedTable:
    """Passed to ``Model._save_table()`` instead of the model class, to avoid a queryset.

    Django makes a queryset for each save: ``cls._base_manager.using(alias)``. A save by a plan
    mostly needs no queryset. So this object stands in for the class and for the base manager, and
    ``using()`` returns a :class:`SavedRows`, which makes the queryset only when it is used.

    :param is_row_missing: whether the UPDATE was sent already, and found no row.
    """

    __slots__ = ("_manager", "_meta", "is_row_missing")

    def __init__(self, model: Any, *, is_row_missing: bool) -> None:
        self._meta = model._meta
        self._manager = model._base_manager
        self.is_row_missing = is_row_missing

    @property
    def _base_manager(self) -> SavedTable:
        return self

    @property
    def manager(self) -> Any:
        """Django's base manager of the model, for which this object stands."""
        return self._manager

    def using(self, alias: str) -> SavedRows:
        return SavedRows(self._manager, alias, is_row_missing=self.is_row_missing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class SavedRows:
    """Stands for the queryset ``manager.using(alias)``, and makes it when an attribute is used.

    :param is_row_missing: whether the UPDATE of the saved row was sent already, and found no row.
    """

    __slots__ = ("alias", "is_row_missing", "manager")

    def __init__(self, manager: Any, alias: str, *, is_row_missing: bool = False) -> None:
        self.manager, self.alias, self.is_row_missing = manager, alias, is_row_missing

    @property
    def model(self) -> Any:
        return self.manager.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager.using(self.alias), name)


class SavedFields(NamedTuple):
    """The fields that saves of a model write. Valid for all saves with the same ``update_fields``.

    :param declared: the fields of the model, as Django lists them. Django makes a new list when a
        field is added.
    :param attnames: the attnames of these fields.
    :param pk: the attname of the primary key.
    :param key: the attname of the shard key.
    :param written: the fields that are written, in the order of the SQL.
    """

    declared: Any
    attnames: frozenset[str]
    pk: str
    key: str
    written: Sequence[Any]


#: The fields that saves write, by model and by the names in ``update_fields``. None means that
#: Django must find the fields at each save.
_fields: dict[Any, dict[frozenset[str] | None, SavedFields | None]] = {}


def forget() -> None:
    """Drop all plans of saves, because the settings have changed."""
    _saves.clear()
    _fields.clear()


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

    Return None, without sending anything, if Django must update the row. For example, Django does
    the first two saves of the same fields of a model. The plan is made at the second one.

    :param options: the shard key and the group of the row's model.
    :param rows: all rows of the table on the row's shard.
    :param key: the value of the shard key, prepared by its field.
    :param pk: the value of the primary key.
    :param new_values: tuples (field, None, new value), as Django's ``_do_update()`` gets them.
    :param names: the names of the fields to be saved; None for all fields.
    """
    assert options.key is not None
    plan = plan_of_save(options, rows, {options.key.attname: key, "pk": pk}, new_values, names)
    if plan is None:
        return None
    values = [key, plan.conditions[1].target.get_prep_value(pk)]
    connection = connections[rows.alias]
    changed = plan.execute([value for _, _, value in new_values], values, connection)
    return None if changed is None else changed > 0


def save_loaded_row(
    options: ShardOptions, model: Any, row: Any, alias: str, names: frozenset[str] | None
) -> bool | None:
    """Update ``row`` by a plan that an earlier save has made, and return whether a row matched.

    Does what ``Model._save_table()`` and ``_do_update()`` do before the UPDATE. Return None,
    without sending anything, if Django must save the row. ``pre_save()`` of the fields may have
    been called by then, and Django calls it again.

    :param model: the model whose table is written. Its rows are not cached.
    :param alias: the shard of the row.
    :param names: the names of the fields to be saved; None for all fields.
    """
    loaded = loaded_values(options, model, row, names)
    if loaded is None:
        return None
    key, pk, written = loaded
    new_values = [value for _, value in written]
    connection: Any = connections[alias]
    plan = known_plan(
        options.model, (2, names, type(key), type(pk), *map(type, new_values)), connection
    )
    if plan is None:
        return None
    if is_followed(model, on_shard=getattr(connection, "shard", None) is not None):
        return None
    values = [key, plan.conditions[1].target.get_prep_value(pk)]
    bound = plan.bind(new_values, values, connection)
    return None if bound is None else compiled_update.send(connection, *bound) > 0


def loaded_values(
    options: ShardOptions, model: Any, row: Any, names: frozenset[str] | None
) -> tuple[Any, Any, list[tuple[Any, Any]]] | None:
    """Return what a save needs: the prepared shard key, the primary key, and the new values.

    The new values are pairs of a field and its value, as ``Model._save_table()`` would find them.
    Return None if Django must find the values. Django then calls ``pre_save()`` of the fields once
    more.

    :param model: the model whose table is written.
    :param names: the names of the fields to be saved; None for all fields.
    """
    key = options.key
    if not _saves.get(options.model) or key is None:
        return None
    if not (names is None or type(names) is frozenset):
        return None
    saved = saved_fields(options, model, names)
    attributes = row.__dict__
    if (
        saved is None
        or type(model._base_manager) is not Manager
        # If the shard key is deferred, leave the save to Django, which loads each deferred field
        # when it needs the field.
        or key.attname not in attributes
    ):
        return None
    written = [(field, field.pre_save(row, False)) for field in saved.written]
    key_value, pk = attributes.get(key.attname), attributes.get(saved.pk)
    if key_value is None or pk is None:
        return None
    return key.get_prep_value(key_value), pk, written


def known_plan(model: Any, shape: tuple[Any, ...], connection: Any) -> UpdatePlan | None:
    """Return the plan of a shape of saves; None if there is no plan that fits ``connection``."""
    plan = _saves.get(model, {}).get(shape)
    if plan is None or plan is _SEEN or not plan.fits(connection):
        return None
    known: UpdatePlan = plan
    return known


def known_fields(model: Any, names: frozenset[str] | None) -> SavedFields | None:
    """Return the fields of a save; None if no earlier save with the same ``names`` has found them.

    :param names: the names of the fields to be saved; None for all fields.
    """
    saved = _fields.get(model, {}).get(names)
    return saved if saved is not None and saved.declared is model._meta.concrete_fields else None


def saved_fields(
    options: ShardOptions, model: Any, names: frozenset[str] | None
) -> SavedFields | None:
    """Find the fields of a save, and remember them for :func:`known_fields`.

    Return None if Django must find the fields at each save.
    """
    by_names = _fields.setdefault(model, {})
    try:
        saved = by_names[names]
    except KeyError:
        saved = None
    else:
        if saved is None or saved.declared is model._meta.concrete_fields:
            return saved
    if saved is not None or len(by_names) < MAX_SAVES:
        saved = by_names[names] = _find_saved_fields(options, model, names)
    return saved


def _find_saved_fields(
    options: ShardOptions, model: Any, names: frozenset[str] | None
) -> SavedFields | None:
    meta, key = model._meta, options.key
    declared, pk_fields = meta.concrete_fields, meta.pk_fields
    fields = [
        field
        for field in meta.local_concrete_fields
        if field not in pk_fields
        and (not names or field.name in names or field.attname in names)
        and field is not key
    ]
    if (
        key is None
        or meta.apps is not apps
        or meta.parents
        or len(pk_fields) != 1
        or key not in meta.local_concrete_fields
        or options.key_has_pre_save
        # Since Django 6.0, an UPDATE returns the values of generated fields. A plan does not do so,
        # and leaves such saves to Django.
        or any(field.generated for field in meta.local_concrete_fields)
        or not fields
        # If a plan cannot do a save, Django does it, and calls pre_save() of the fields a second
        # time. That does no harm with the methods of Django's fields. For example,
        # DateTimeField.pre_save() sets the time again, and FileField.pre_save() finds that the file
        # was stored already.
        or not all(
            type(field).pre_save.__module__.startswith("django.db.models.fields")
            for field in fields
        )
    ):
        return None
    attnames = frozenset(field.attname for field in declared)
    return SavedFields(declared, attnames, meta.pk.attname, key.attname, fields)


def plan_of_save(
    options: ShardOptions,
    rows: SavedRows,
    conditions: Mapping[str, Any],
    new_values: Sequence[tuple[Any, Any, Any]],
    names: frozenset[str] | None,
) -> UpdatePlan | None:
    """Return the plan of an UPDATE of one row; None if Django must update the row.

    The arguments are those of :func:`save_row`, except:

    :param conditions: the conditions of the UPDATE, such as ``{"user_id": 1, "pk": 10001}``: first
        the shard key, prepared by its field, then the primary key.
    """
    if names is not None and type(names) is not frozenset:
        return None
    shape = (
        len(conditions), names, *map(type, conditions.values()), *[type(value) for _, _, value in new_values],
    )  # fmt: skip
    plans = _saves.get(options.model)
    plan = None if plans is None else plans.get(shape)
    if plan is None:
        _see(options.model, shape)
        return None
    if type(rows.manager) is not Manager:
        return None  # A base manager of the project may add conditions.
    connection: Any = connections[rows.alias]
    if plan is _SEEN or not plan.fits(connection):
        _learn_save(options, rows, conditions, new_values, shape, connection)
        return None
    known: UpdatePlan = plan
    return known


def _see(model: Any, shape: tuple[Any, ...]) -> None:
    # Do not keep a model of other apps than the installed ones, such as a historical model of a
    # migration. Otherwise Python could not garbage-collect it.
    if model._meta.apps is not apps or not PLAIN_TYPES.issuperset(shape[2:]):
        return
    plans = _saves.setdefault(model, {})
    if shape not in plans and len(plans) < MAX_SAVES:
        plans[shape] = _SEEN


def _learn_save(
    options: ShardOptions,
    rows: SavedRows,
    conditions: Mapping[str, Any],
    new_values: Sequence[tuple[Any, Any, Any]],
    shape: tuple[Any, ...],
    connection: Any,
) -> None:
    """Make the plan of a shape of saves, for later saves. Django does the present save."""
    if any(may_warn(field, value) for field, _, value in new_values):
        return
    plan = plan_of(
        f"save() of {options.model.__name__} with {shape}",
        lambda: _plan_of_example(options, rows, conditions, new_values, connection),
    )
    _saves.setdefault(options.model, {})[shape] = plan


def _plan_of_example(
    options: ShardOptions,
    rows: SavedRows,
    values: Mapping[str, Any],
    new_values: Sequence[tuple[Any, Any, Any]],
    connection: Any,
) -> UpdatePlan | None:
    names = tuple(values)
    conditions, examples = [], []
    for number, (name, value) in enumerate(values.items()):
        part = condition_of(rows.model, options, name, value, is_excluded=False)
        if part is None or not (part.form is ValueForm.VALUE or value is None):
            return None
        conditions.append(part)
        examples.append(part.example(part.prepared(value), number, 1))
    if None in examples:
        return None
    shape = Shape(rows.model, options, names, tuple(conditions))
    declarations = Declarations(shape)
    matching = rows.manager.using(rows.alias)
    for name, part, example in zip(names, conditions, examples, strict=True):
        value = None if part.form is ValueForm.FIXED else example
        matching = matching.filter(**{name: value})
    pairs = [(field, value) for field, _, value in new_values]
    example = matching.query, Recording(shape, (), tuple(examples))
    return compile_update(shape, [example], pairs, declarations, connection)
