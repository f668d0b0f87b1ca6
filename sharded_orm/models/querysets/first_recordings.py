"""Decides which classes of querysets record the calls that build them.

A recorded queryset can be read with a plan (SQL that was compiled once). A new queryset of such a
class begins with an empty recording, which this module provides.
"""

from __future__ import annotations

from inspect import getattr_static, isdatadescriptor
from typing import Any, Generic

from django.apps import apps
from django.db.models.query import QuerySet

from sharded_orm import runtime
from sharded_orm.method_origin import module_of
from sharded_orm.models.plans import kept_shapes
from sharded_orm.models.plans.shapes import Recording

# A read by a plan (stored SQL of an earlier, similar query) does not call these methods. If a
# project overrides one of them in a queryset class, the class records no calls and uses no plans.
_SKIPPED = (
    "__init__", "__iter__", "__new__", "_chain", "_clone", "_fetch_all", "_filter_or_exclude",
    "_filter_or_exclude_inplace", "_values", "db", "filter", "query",
)  # fmt: skip
_METHODS = {n for n, m in vars(QuerySet).items() if callable(m) or isinstance(m, property)}
# The attributes that are copied or set by _clone() of Django's QuerySet and of this package's
# querysets.
COPIED = frozenset(QuerySet().__dict__) | {
    "_built_part", "_is_using_called", "_partial", "_recording", "_scatters", "_uncached",
}  # fmt: skip

#: The usual number of attributes of a queryset that records its calls. If a queryset has another
#: number of attributes, attributes were added or deleted.
PLAIN_COUNT = len(QuerySet().__dict__) + 1

_recordings: dict[tuple[Any, Any], Recording | None] = {}
#: Maps (queryset class, model) to the attributes of the first queryset that records its calls.
#: Later querysets copy these attributes, which is faster than __init__(). But each gets dicts of
#: its own. The value is None if they cannot be copied.
templates: dict[tuple[Any, Any], dict[str, Any] | None] = {}


def forget() -> None:
    """Drop all recordings and shapes (the stored forms of recorded querysets).

    This is called when the settings have changed, because another field may now determine the
    shard.
    """
    global _recordings, templates
    kept_shapes.forget()
    # Make new dicts instead of emptying the old ones. Another thread may be about to add a
    # recording that it has made from the old settings. It adds this recording to the old dict,
    # which nobody reads any more. Replace _recordings before templates, because a template contains
    # a recording.
    _recordings = {}
    templates = {}


runtime.on_reset(forget)


def first_recording(queryset_class: Any, model: Any, recorder: Any) -> Recording | None:
    """Return an empty recording of calls for a new queryset; None if its class records no calls.

    :param recorder: the mixin that records the calls, a base class of ``queryset_class``.
    """
    recordings = _recordings
    try:
        return recordings[queryset_class, model]
    except KeyError:
        pass
    if model is None or model._meta.apps is not apps or not apps.models_ready:
        # Do not store a model in the dict if it is not in the registry of apps, such as a model in
        # a migration. The dict would prevent its garbage collection.
        return None
    shape = None
    if _skips_nothing(queryset_class, recorder):
        shape = queryset_class._first_shape(model)
    recording = None if shape is None else Recording(shape)
    # If another thread has stored a recording meanwhile, return that one, because all querysets of
    # a class and model must share one recording.
    kept = recordings.setdefault((queryset_class, model), recording)
    if kept is recording and shape is not None:
        kept_shapes.add_root(shape)
    return kept


def template(queryset: Any) -> dict[str, Any] | None:
    """Return the attributes of ``queryset``, to copy them to new querysets of its class and model.

    Return None if they cannot be copied. This is so in two cases. The project has added an
    attribute, and perhaps querysets must not share its value. Or the project's class overrides how
    an attribute is set, so that a copy in ``__dict__`` would have no effect.

    :param queryset: a new queryset that records its calls.
    """
    queryset_class: Any = type(queryset)
    attributes = queryset.__dict__
    if (
        attributes.keys() <= COPIED
        and queryset_class.__setattr__ is object.__setattr__
        and not any(
            map(isdatadescriptor, (getattr_static(queryset_class, n, None) for n in attributes))
        )
    ):
        return {**attributes}
    return None


def _skips_nothing(queryset_class: Any, recorder: Any) -> bool:
    """Return whether querysets of this class can be read with plans (SQL that was compiled once).

    A read with a plan does not call some methods, such as ``filter()``. If the project overrides
    one of them, the plan would skip the project's code, so no plan is used. All base classes are
    examined, even those that come after this package's classes in the method resolution order.
    """
    bases = [base for base in queryset_class.__mro__ if base not in (object, Generic)]
    # In the method resolution order, a class of the project may come after the recorder. Such a
    # class must override no method of Django's QuerySet, because the recorder does not always call
    # super().
    behind = bases[bases.index(recorder) :]
    return all(
        _module_of(member).startswith(("django.db.models.", "sharded_orm.models."))
        for base in bases
        for name, member in vars(base).items()
        if name in _SKIPPED or (base in behind and name in _METHODS)
    )


def _module_of(member: Any) -> str:
    if type(member) is property:
        return module_of(member.fget)
    return module_of(member.__func__ if type(member) is staticmethod else member)
