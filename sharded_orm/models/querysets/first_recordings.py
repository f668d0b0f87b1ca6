"""The empty recordings with which new querysets begin, and which classes of querysets record calls."""

from __future__ import annotations

from inspect import getattr_static, isdatadescriptor
from typing import Any, Generic

from django.apps import apps
from django.db.models.query import QuerySet

from sharded_orm import runtime
from sharded_orm.method_origin import module_of
from sharded_orm.models.plans.shapes import Recording
from sharded_orm.models.plans.shapes import forget as forget_shapes

# A read by a plan (stored SQL of an earlier, similar query) does not call these methods. So the
# querysets of a project that overrides one of them are not recorded and use no plans.
_SKIPPED = (
    "__init__", "__iter__", "__new__", "_chain", "_clone", "_fetch_all", "_filter_or_exclude",
    "_filter_or_exclude_inplace", "_values", "db", "filter", "query",
)  # fmt: skip
_METHODS = {n for n, m in vars(QuerySet).items() if callable(m) or isinstance(m, property)}
# The attributes that are copied or set by _clone() of Django's QuerySet and of this package's
# querysets.
COPIED = frozenset(QuerySet().__dict__) | {
    "_is_using_called", "_partial", "_recording", "_scatters", "_uncached",
}  # fmt: skip

#: The number of attributes of a queryset that records its calls, if none was added and none deleted.
PLAIN_COUNT = len(QuerySet().__dict__) + 1

_recordings: dict[tuple[Any, Any], Recording | None] = {}
#: The attributes of a new queryset that records its calls, by its class and model; None if each new
#: queryset must set them itself. Dicts among them are replaced by new ones for each queryset.
templates: dict[tuple[Any, Any], dict[str, Any] | None] = {}


def forget() -> None:
    """Drop all recordings and shapes (the stored forms of recorded querysets).

    They contain the field that determines the shard. After a change of the settings, it may be another
    one.
    """
    global _recordings, templates
    forget_shapes()
    # Make new dicts: another thread may be about to enter a recording of the old settings in the old
    # dict. The recordings come first: then a template in the new dict has none of the old ones.
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
        # Do not store a historical model in the dict, because it must be possible to
        # garbage-collect it.
        return None
    shape = None
    if _skips_nothing(queryset_class, recorder):
        shape = queryset_class._first_shape(model)
    recording = None if shape is None else Recording(shape)
    # Another thread may have made one meanwhile. All querysets must have the same.
    return recordings.setdefault((queryset_class, model), recording)


def template(queryset: Any) -> dict[str, Any] | None:
    """Return the attributes of ``queryset``, to be set on other new querysets of its class and
    model.

    Return None if setting one of them may need more than an entry in ``__dict__``, or if one is a
    project's own attribute, whose value querysets must not share.
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
    """Return whether a plan may read querysets of this class, although it skips some methods.

    The skipped methods must be Django's or this package's: then a plan has the same effect. All
    base classes are examined, even those behind this package's classes in the method resolution
    order.
    """
    bases = [base for base in queryset_class.__mro__ if base not in (object, Generic)]
    # In the method resolution order, a class of the project may come after the recorder. It must
    # not override a method of Django's QuerySet, because the recorder does not always call super().
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
