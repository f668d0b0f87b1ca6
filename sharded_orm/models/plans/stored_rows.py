"""save() of a stored row, without the steps of Django that do nothing for it.

If a save has a plan, most of its time is not the UPDATE. Django sends two signals, and looks for
deferred fields and for tables of parents. The sharded model checks the row twice, because a
receiver may change it in between. For most rows, none of these steps does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal

from django.db import models, router, transaction
from django.db.models import Model
from django.dispatch import Signal, dispatcher

from sharded_orm import runtime
from sharded_orm.backends.group import relocation
from sharded_orm.backends.write_hooks import observer
from sharded_orm.method_origin import module_of
from sharded_orm.models.plans.saves import known_fields, save_loaded_row
from sharded_orm.models.plans.switch import are_write_plans_on
from sharded_orm.models.sharding.kept_shard import UNCHANGEABLE, KeptShard
from sharded_orm.models.sharding.options import ShardOptions, required_options

# The methods that a save calls, in each class and in the part of Django that ours call.
_CALLED = (
    "save_base", "_save_table", "_do_update", "_save_parents", "_prepare_related_fields_for_save",
    "_get_pk_val", "_is_pk_set",
)  # fmt: skip
_of_model = attrgetter(*_CALLED)
_of_django = attrgetter("save", *_CALLED[:3])
# Django's module, whose signals a test may replace.
_base: Any = models.base
_send = Signal.send
# Attributes of ``_state`` that say how the shard of a new row is chosen. They are dropped after a save.
_CHOICES = frozenset({"near", "drawn_shard"})


class SaveMethods:
    """The methods that save a row of a sharded model, if no project has methods of its own.

    :param base: the class of this library from which all sharded models derive.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._expected = _of_model(base)
        self._of_django = _of_django(super(base, base))
        # Another package may have replaced the methods before this one was imported.
        modules = {_base.__name__, dispatcher.__name__}
        self._are_known = modules.issuperset(map(module_of, (*_of_django(Model), _send)))

    def are_used_by(self, row: Any) -> bool:
        """Whether ``save()`` of ``row`` calls these methods and no others. Takes about a microsecond."""
        model = type(row)
        return (
            self._are_known
            and _of_model(model) == self._expected
            # A mixin may stand between our class and Django's.
            and _of_django(super(self._base, model)) == self._of_django
            and row.__dict__.keys().isdisjoint(_CALLED)
        )


def save_stored_row(
    row: Any,
    methods: SaveMethods,
    arguments: Mapping[str, Any],
    save_cached: Callable[[Any, ShardOptions, Any, str, frozenset[str] | None], bool | None],
) -> Literal[True] | KeptShard | None:
    """Update ``row`` as ``save()`` does, and return True if a row matched.

    Otherwise return the shard that was looked up, and whether the UPDATE was sent; None if no shard
    was looked up. Then Django must save the row, or go on after the UPDATE, if no row matched. Sends
    at most one query.

    This does what ``Model.save()`` and ``Model.save_base()`` do for a row that is stored and
    complete. The model must have no parents, no methods of the project in their place, and no
    receivers of ``pre_save`` and ``post_save``. Errors are those of Django.

    :param methods: the methods that save a row of which no step may be left out.
    :param arguments: the arguments of ``save()``.
    :param save_cached: does what :func:`save_loaded_row` does, for a row of a cached model. Its
        arguments are what the cache knows of the model, the model's options, the row, its shard,
        and the names of the fields to be saved.
    """
    model, state = type(row), row._state
    names = arguments.get("update_fields")
    if names is not None:
        if not names or type(names) not in (list, tuple, set, frozenset):
            return None
        names = frozenset(names)
    saved = known_fields(model, names)
    if (
        saved is None
        or not arguments.keys() <= {"update_fields"}
        # If fields are deferred, Django saves the others.
        or (names is None and not row.__dict__.keys() >= saved.attnames)
        or state.adding
        or not _CHOICES.isdisjoint(state.__dict__)
        or model._meta.select_on_save
        or not are_write_plans_on()
        or not methods.are_used_by(row)
        or _is_heard(model)
    ):
        return None
    # From here on, do the remaining steps in the order of Model.save() and Model.save_base(). Those of
    # Model._save_parents() and Model._save_table() are left out, too, but for the UPDATE.
    options = required_options(model)
    has_related_rows = bool(state.fields_cache)
    if has_related_rows:
        row._prepare_related_fields_for_save(operation_name="save")
    using = router.db_for_write(model, instance=row)
    if type(row.__dict__.get(saved.key)) not in UNCHANGEABLE:
        return None
    generation, key = relocation.generation, options.key_of(row)
    shard = runtime.locate(options.group, key)
    if shard is None or shard.alias != using:
        return None  # The row is refused.
    if has_related_rows:
        row._refuse_relations_to_other_shards(options, using, names)
    try:
        cached = observer.cached_model_of(model)
        if cached is None:
            is_updated = save_loaded_row(options, model, row, using, names)
        else:
            is_updated = save_cached(cached, options, row, using, names)
    except Exception:
        # Django's context manager does nothing without an error, so enter it only now.
        with transaction.mark_for_rollback_on_error(using=using):
            raise
    if is_updated:
        state.db = using
        return True
    # Django would ask for the shard again. The strategy would send a query for it, if keys move.
    kept = KeptShard.of(generation, options.group, key, shard)
    kept.has_found_none = is_updated is False
    return kept


def _is_heard(model: Any) -> bool:
    """Whether somebody may notice that the signals of a save are not sent."""
    for signal in (_base.pre_save, _base.post_save):
        if (signal.receivers and signal.has_listeners(model)) or (
            getattr(signal.send, "__func__", None) is not _send
        ):
            return True
    return False
