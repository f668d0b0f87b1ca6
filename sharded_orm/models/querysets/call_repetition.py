"""Repeats the calls that have built a queryset, with other numbers in the conditions.

A page of a list is built by the same calls each time. To repeat the calls as a whole takes a third
of the time of making them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from django.db.models import Q

from sharded_orm.method_origin import module_of
from sharded_orm.models.plans.conditions import ValueForm
from sharded_orm.models.plans.id_batch import PLAIN_INTEGERS
from sharded_orm.models.plans.shapes import Recording

# The methods that ``build`` may call.
_BUILDING = ("__getitem__", "exclude", "filter", "order_by", "values_list")


class CallSequence:
    """Calls that build a queryset: calls of ``filter()`` and ``exclude()``, and then others.

    :param example: the recorded calls, with any numbers in the conditions.
    """

    __slots__ = ("conditions", "shape")

    def __init__(self, example: Recording) -> None:
        self.shape = example.shape
        #: A pair for each call of filter() and exclude(): True for exclude(), and the names of its
        #: conditions.
        self.conditions = [(excluded, sorted(named)) for excluded, named in example.filters]  # type: ignore[arg-type]  # _takes_numbers() has refused Q objects

    def with_numbers(self, numbers: tuple[int, ...], most: int) -> Recording:
        """Return the recording of these calls with ``numbers``, and of the slice ``[:most]``."""
        rest = iter(numbers)
        filters = [
            (excluded, dict(zip(names, rest, strict=False))) for excluded, names in self.conditions
        ]
        return Recording(self.shape, tuple(filters), numbers, (0, most))


def repeat_calls(
    queryset: Any,
    name: Hashable,
    numbers: tuple[int, ...],
    most: int,
    build: Callable[..., Any],
) -> Any:
    """Return ``build(queryset, *numbers)[:most]``.

    ``build`` is called once for each name; later its calls are repeated.

    :param name: a name for the calls of ``build``. If two calls of this function have the same name
        and querysets of the same class and model, their ``build`` may differ only in the numbers.
    :param numbers: the values of all conditions of ``build``, in the order of its calls. If a call
        has several conditions, they are in the order of their names.
    :param most: the largest number of rows, at least 1.
    :param build: builds a queryset from a queryset and numbers, by the methods ``exclude()``,
        ``filter()``, ``order_by()`` and ``values_list()`` only.
    """
    recording: Recording | None = queryset._recorded()
    if (
        recording is None
        or recording.limits is not None
        or not {int}.issuperset(map(type, numbers))
    ):
        return build(queryset, *numbers)[:most]
    known = recording.shape.repeated
    try:
        calls = known[name]
    except KeyError:
        calls = known[name] = _calls_of(queryset, len(numbers), build)
    if calls is None:
        return build(queryset, *numbers)[:most]
    return queryset._with_recording(calls.with_numbers(numbers, most))


def _calls_of(queryset: Any, count: int, build: Callable[..., Any]) -> CallSequence | None:
    """Return the calls of ``build``; None if they must not be repeated without it.

    :param count: the number of conditions.
    """
    if not _calls_the_library(type(queryset)):
        return None
    # Numbers that all differ show whether ``build`` uses them in the order of the conditions.
    numbers = tuple(range(count))
    example = build(queryset, *numbers)._recorded()
    if example is None or example.values != numbers or not _takes_numbers(example):
        return None
    return CallSequence(example)


def _takes_numbers(example: Recording) -> bool:
    """Whether each condition takes a number, and sends it to the database as it is."""
    return (
        not example.shape.repeats_key
        and not any(isinstance(given, Q) for _, given in example.filters)
        and all(
            part.form is ValueForm.VALUE
            and not part.takes_instance
            and type(part.target).get_prep_value in PLAIN_INTEGERS
            for part in example.shape.conditions
        )
    )


def _calls_the_library(kind: Any) -> bool:
    """Whether a class of querysets overrides no method that builds querysets.

    If a project overrides one of them, each page must call the project's method.
    """
    return all(
        module_of(getattr(kind, name)).startswith(("django.db.models.", "sharded_orm.models."))
        for name in _BUILDING
    )
