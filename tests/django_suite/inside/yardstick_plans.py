"""Puts the queryset that reads by plans under every manager, and makes each read use a plan at once.

Otherwise a plan is used at the third use of a shape, and most tests read each shape once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: The reads that were done by plans.
planned = 0


def install() -> None:
    """Let each manager of Django make querysets that read by plans. Called after ``django.setup()``."""
    _import_without_models()
    from django.db.models import Manager

    from sharded_orm.models.querysets.direct_plans import PlanQuerySet

    use_plans_at_once()
    # The name is part of representations, and is looked up by pickle.
    kind = globals()["QuerySet"] = type("QuerySet", (PlanQuerySet,), {})
    Manager._queryset_class = kind  # type: ignore[attr-defined]


def use_plans_at_once() -> None:
    """Make each recorded read of a model that is not sharded use a plan from its first use on."""
    from django.db import connections, router

    from sharded_orm.models.querysets.direct_plans import DirectPlanReader
    from sharded_orm.models.querysets.plan_examples import learn
    from sharded_orm.models.querysets.recorder import CallRecorder

    @wraps(CallRecorder.get)  # The package looks at the module of a method.
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = self._recorded() if kwargs and not args else None
        if recording is not None and recording.limits is None and are_plain(kwargs.values()):
            self._with_recording(recording).filter(**kwargs)
        return get_by_plan(self, *args, **kwargs)

    def read(self: Any, kind: str, recording: Any, limits: Any, read_by_django: Any) -> Any:
        alias = self._db or router.db_for_read(self.model, **self._hints)
        plans = recording.shape.plans
        if (kind, alias) not in plans:
            learn(kind, (kind, alias), recording, type(self), connections[alias])
        global planned
        planned += plans[kind, alias] is not None
        return read_by_plan(self, kind, recording, limits, read_by_django)

    get_by_plan, read_by_plan = CallRecorder.get, DirectPlanReader._read
    for name in (
        "filter", "exclude", "order_by", "values", "values_list", "only", "defer", "select_related",
    ):  # fmt: skip
        setattr(CallRecorder, name, _twice(getattr(CallRecorder, name)))
    CallRecorder.get = get  # type: ignore[method-assign]
    DirectPlanReader._read = read  # type: ignore[method-assign]


def _twice(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make the call on a copy first, so that its shape is known."""

    @wraps(method)  # The package looks at the module of a method.
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if are_plain([*args, *kwargs.values()]):
            is_deferred, self._defer_next_filter = self._defer_next_filter, False
            recording = self._recorded()
            self._defer_next_filter = is_deferred
            if recording is not None:
                copy = self._with_recording(recording)
                copy._defer_next_filter = is_deferred
                method(copy, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


def are_plain(values: Any) -> bool:
    """Whether all values can be used twice. Others may be iterators, or warn each time."""
    from django.db.models import Model

    from sharded_orm.models.plans.conditions import _EXAMPLES

    plain = {*_EXAMPLES, bool, type(None), list, tuple, set, frozenset} - {datetime}
    return all(type(value) in plain or isinstance(value, Model) for value in values)


def _import_without_models() -> None:
    """Make the modules of ``sharded_orm.models`` importable without its models.

    The suite chooses its apps, and the package is not among them.
    """
    spec = find_spec("sharded_orm")
    assert spec is not None and spec.submodule_search_locations
    package = ModuleType("sharded_orm.models")
    package.__path__ = [f"{path}/models" for path in spec.submodule_search_locations]
    sys.modules["sharded_orm.models"] = package
