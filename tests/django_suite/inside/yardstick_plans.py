"""Puts the queryset that reads by plans under every manager, and makes each read use a plan at once.

Otherwise a plan is used at the third use of a shape, and most tests read each shape once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

#: The reads that were done by plans.
planned = 0


def install(*, compares: bool) -> None:
    """Let each manager of Django make querysets that read by plans. Called after ``django.setup()``.

    :param compares: let Django do each read, and compare it with the read by the plan.
    """
    _import_without_models()
    from django.db.models import Manager

    from sharded_orm.models.querysets.direct_plans import PlanQuerySet

    use_plans_at_once(compares=compares)
    # The name is part of representations, and is looked up by pickle.
    kind = globals()["QuerySet"] = type("QuerySet", (PlanQuerySet,), {})
    Manager._queryset_class = kind  # type: ignore[attr-defined]


def use_plans_at_once(*, compares: bool = False) -> None:
    """Make each recorded read of a model that is not sharded use a plan from its first use on.

    :param compares: let Django do each read, and compare it with the read by the plan.
    """
    from django.db import connections, router

    from sharded_orm.models.querysets.direct_plans import DirectPlanReader
    from sharded_orm.models.querysets.plan_examples import learn
    from sharded_orm.models.querysets.recorded_reads import RecordedReads
    from sharded_orm.models.querysets.recorder import CallRecorder

    @as_part_of(RecordedReads.get)
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = self._recorded() if kwargs and not args else None
        if recording is None or recording.limits is not None:
            return get_by_plan(self, *args, **kwargs)
        return get_by_plan(self._with_recording(recording).filter(**kwargs))

    def read(self: Any, kind: str, recording: Any, limits: Any, read_by_django: Any) -> Any:
        alias = self._db or router.db_for_read(self.model, **self._hints)
        plans = recording.shape.plans
        if (kind, alias) not in plans:
            learn(kind, (kind, alias), recording, type(self), connections[alias])
        plan = plans[kind, alias]
        global planned
        planned += plan is not None
        if not compares or plan is None or self._for_write:
            return read_by_plan(self, kind, recording, limits, read_by_django)
        return _compared(self, kind, plan, recording, limits, read_by_django, connections[alias])

    get_by_plan, read_by_plan = RecordedReads.get, DirectPlanReader._read
    for name in ("filter", "exclude"):
        setattr(CallRecorder, name, _known_at_once(getattr(CallRecorder, name), name == "exclude"))
    RecordedReads.get = get  # type: ignore[method-assign]
    DirectPlanReader._read = read  # type: ignore[method-assign]


def as_part_of(method: Any) -> Callable[[Any], Any]:
    """Let the package take a function for one of its own: for one of the module that defines ``method``."""

    def decorate(function: Any) -> Any:
        return FunctionType(
            function.__code__, method.__globals__, method.__name__, None, function.__closure__
        )

    return decorate


def _known_at_once(method: Callable[..., Any], excluded: bool) -> Callable[..., Any]:
    """Learn the filter of a related manager at once. Others are recorded from the first time on."""

    @as_part_of(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._defer_next_filter and kwargs and not args:
            self._defer_next_filter = False
            recording = self._recorded()
            self._defer_next_filter = True
            if recording is not None and recording.limits is None:
                recording.learn_filter(kwargs, excluded=excluded)
        return method(self, *args, **kwargs)

    return call


def _compared(
    queryset: Any,
    kind: str,
    plan: Any,
    recording: Any,
    limits: Any,
    read_by_django: Callable[[], Any],
    connection: Any,
) -> Any:
    """Let Django read, and compare its statement and its result with those of ``plan``."""
    from sharded_orm.models.plans.plan import GET, ROWS

    sent: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        sent.append((sql, parameters))
        return execute(sql, parameters, many, context)

    parameters = plan.parameters(recording.values, connection)
    with connection.execute_wrapper(note):
        result = read_by_django()
    if parameters is None:
        return result
    statement = plan.statement(parameters, limits, connection), tuple(parameters)
    assert sent, f"Django sends nothing instead of {statement}"
    assert repr(sent[0]) == repr(statement), f"{sent[0]} by Django, {statement} by its plan"
    by_django = queryset._result_cache if result is None else result
    with _unnoticed(connection):
        by_plan = plan.read(kind, queryset, recording.values, limits, connection)
        if kind in (ROWS, GET):
            assert list(map(_described, by_plan)) == list(map(_described, by_django))
        else:
            assert (bool(by_plan), by_plan or 0) == (bool(by_django), by_django or 0)
    return result


@contextmanager
def _unnoticed(connection: Any) -> Iterator[None]:
    """Within the ``with`` block, the tests neither see statements nor new instances."""
    from django.db.models.signals import post_init, pre_init

    log, wrappers = connection.queries_log, connection.execute_wrappers
    receivers = [(signal, signal.receivers) for signal in (pre_init, post_init)]
    connection.queries_log, connection.execute_wrappers = deque(maxlen=log.maxlen), []
    for signal, _ in receivers:
        signal.receivers = []
    try:
        yield
    finally:
        connection.queries_log, connection.execute_wrappers = log, wrappers
        for signal, found in receivers:
            signal.receivers = found


def _described(row: Any) -> Any:
    """Return what is compared of a row: a value, or the fields and the state of an instance."""
    from django.db.models import Model

    if not isinstance(row, Model):
        return type(row), repr(row)
    state, names = row._state, {field.attname for field in row._meta.concrete_fields}
    fields = {name: _text_of(value) for name, value in vars(row).items() if name in names}
    return type(row), fields, state.db, state.adding


def _text_of(value: Any) -> str:
    from django.db.models.fields.files import FieldFile

    if isinstance(value, FieldFile):
        # A receiver of post_init, which Django's instances have met, has made it of the name.
        return repr(value.name)
    if type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__} {vars(value)}"  # without its address
    return repr(value)


def _import_without_models() -> None:
    """Make the modules of ``sharded_orm.models`` importable without its models.

    The suite chooses its apps, and the package is not among them.
    """
    spec = find_spec("sharded_orm")
    assert spec is not None and spec.submodule_search_locations
    package = ModuleType("sharded_orm.models")
    package.__path__ = [f"{path}/models" for path in spec.submodule_search_locations]
    sys.modules["sharded_orm.models"] = package
