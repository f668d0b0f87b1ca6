"""A fast ``save()`` of a stored row, which leaves out steps that do nothing for most rows.

If a plan is used, that is, if the UPDATE was compiled by an earlier save, most of the time of a
save is spent on other steps: Django sends two signals, looks for deferred fields, and looks for
tables of parent models. The sharded model checks the row twice, because a receiver of a signal may
change the row between the checks. For most rows, there are no receivers, no deferred fields and no
parents, so these steps do nothing. The fast ``save()`` leaves them out for such rows.
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
from sharded_orm.models.sharding.shard_refusals import refuse_relations_to_other_shards

# The methods that save() calls. If a project overrides one of them, the fast save is not used.
_CALLED = (
    "save_base", "_save_table", "_do_update", "_save_parents", "_prepare_related_fields_for_save",
    "_get_pk_val", "_is_pk_set",
)  # fmt: skip
_of_model = attrgetter(*_CALLED)
_of_django = attrgetter("save", *_CALLED[:3])
# The module django.db.models.base. Read the signals from it at each save, because a test may
# replace them.
_base: Any = models.base
_send = Signal.send
# Attributes of ``_state`` that choose the shard of a new row. The fast save does not handle them.
_CHOICES = frozenset({"near", "drawn_shard"})


class SaveMethods:
    """Knows the methods of Django and of this library that ``save()`` calls.

    With it, the fast save notices that a project has overridden one of them.

    :param base: the class ``ShardedModel``, from which all sharded models derive.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._expected = _of_model(base)
        self._of_django = _of_django(super(base, base))
        # False if another package has replaced Django's methods before this library was imported.
        # Then the fast save is never used.
        modules = {_base.__name__, dispatcher.__name__}
        self._are_known = modules.issuperset(map(module_of, (*_of_django(Model), _send)))

    def are_used_by(self, row: Any) -> bool:
        """Whether ``save()`` of ``row`` calls no method that a project has overridden.

        Takes about a microsecond.
        """
        model = type(row)
        return (
            self._are_known
            and _of_model(model) == self._expected
            # A mixin of a project may come after ShardedModel and before Django's Model in the
            # method resolution order. So compare the methods of these classes, too.
            and _of_django(super(self._base, model)) == self._of_django
            and row.__dict__.keys().isdisjoint(_CALLED)
        )


def save_stored_row(
    row: Any,
    methods: SaveMethods,
    arguments: Mapping[str, Any],
    save_cached: Callable[[Any, ShardOptions, Any, str, frozenset[str] | None], bool | None],
) -> Literal[True] | KeptShard | None:
    """Try to save ``row`` the fast way, and return True if its UPDATE has found the row.

    Otherwise, the caller must call Django's ``save()``. This function then returns what Django's
    ``save()`` need not find out again, as a :class:`KeptShard`: the shard of the row, and whether
    the UPDATE was sent and found no row. Or it returns None if it has not looked up the shard.
    Sends at most one query.

    The fast way does what ``Model.save()`` and ``Model.save_base()`` do for a stored row with all
    its fields loaded. It is not used if the model has parents, if the project overrides a method
    that ``save()`` calls, or if ``pre_save`` or ``post_save`` have receivers. Errors are those of
    Django.

    :param methods: knows the methods that ``save()`` calls, to notice that one is overridden.
    :param arguments: the arguments of ``save()``.
    :param save_cached: a function that does what :func:`save_loaded_row` does, for a cached model.
        Its arguments are the :class:`CachedModel`, the model's options, the row, its shard, and the
        names of the fields to be saved.
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
        # If fields are deferred, Django saves only the loaded fields. The fast way cannot do that.
        or (names is None and not row.__dict__.keys() >= saved.attnames)
        or state.adding
        or not _CHOICES.isdisjoint(state.__dict__)
        or model._meta.select_on_save
        or not are_write_plans_on()
        or not methods.are_used_by(row)
        or _is_heard(model)
    ):
        return None
    # Now do the steps that this row needs, in the order of Model.save() and Model.save_base(). Of
    # the steps of Model._save_parents() and Model._save_table(), only the UPDATE is needed.
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
        refuse_relations_to_other_shards(options, row, using, names)
    try:
        cached = observer.cached_model_of(model)
        if cached is None:
            is_updated = save_loaded_row(options, model, row, using, names)
        else:
            is_updated = save_cached(cached, options, row, using, names)
    except Exception:
        # Django saves inside of mark_for_rollback_on_error(), which does something only after an
        # error. So it is enough to call it now.
        with transaction.mark_for_rollback_on_error(using=using):
            raise
    if is_updated:
        state.db = using
        return True
    # Remember the shard for the usual save, which follows. It would look up the shard again, which
    # costs a query if keys can move.
    kept = KeptShard.of(generation, options.group, key, shard)
    kept.has_found_none = is_updated is False
    return kept


def _is_heard(model: Any) -> bool:
    """Whether ``pre_save`` or ``post_save`` must be sent.

    True if one of them has a receiver for ``model``, or if its ``send()`` was replaced.
    """
    for signal in (_base.pre_save, _base.post_save):
        if (signal.receivers and signal.has_listeners(model)) or (
            getattr(signal.send, "__func__", None) is not _send
        ):
            return True
    return False
