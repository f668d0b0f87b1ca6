"""The names of a group's schemas: what ``DATABASE_NAME`` may be, and where two groups meet.

Pure: no Django, no drivers. A name is text around one decimal number, so that two groups
can be compared by their ranges: whatever a document names, no shard is visited.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]

_EXPECTED = (
    "a template of {shard} (once; with leading zeros as {shard:05d}) and {group}, and nothing else in"
    " braces"
)
# Two digits: no database has longer names.
_WIDTH = re.compile(r"(?:0([0-9]{1,2}))?d?")


@dataclass(frozen=True, slots=True)
class SchemaNames:
    """``before``, a number of ``width`` digits at least, ``after``."""

    before: str
    after: str
    width: int

    @classmethod
    def of(cls, template: object, group: str) -> SchemaNames:
        """The names that ``DATABASE_NAME`` makes for the group called ``group``.

        :raises ValueError: it is no such template.
        """
        if not isinstance(template, str):
            raise ValueError(f"it must be {_EXPECTED}")
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as exc:
            raise ValueError(f"it must be {_EXPECTED} ({exc})") from exc
        texts, width = [""], None
        for literal, name, spec, conversion in parts:
            texts[-1] += literal
            digits = _WIDTH.fullmatch(spec or "")
            if name == "group" and not spec and conversion is None:
                texts[-1] += group
            elif name == "shard" and width is None and digits and conversion is None:
                width = int(digits[1] or 1)
                texts.append("")
            elif name is not None:
                raise ValueError(f"it must be {_EXPECTED}")
        if width is None:
            raise ValueError(f"it must be {_EXPECTED}")
        return cls(texts[0], texts[1], max(width, 1))

    def _windows(self, last: int) -> Iterator[_Window]:
        """One for each number of digits that the numbers 0 to ``last`` have."""
        for digits in range(self.width, max(self.width, len(str(last))) + 1):
            # What has more digits than the width has no leading zero.
            least = 0 if digits == self.width else 10 ** (digits - 1)
            yield _Window(self.before, digits, self.after, least)


def shared_number(
    one: SchemaNames, of_one: Sequence[Span], other: SchemaNames, of_other: Sequence[Span]
) -> int | None:
    """A number of ``of_other`` whose name is also that of a number of ``of_one``; None for none.

    The spans are first and last numbers, both included; they ascend and do not overlap. Costs
    a few steps per span, however many numbers it has.
    """
    if not of_one or not of_other:
        return None
    for window in one._windows(of_one[-1][1]):
        for against in other._windows(of_other[-1][1]):
            if (met := _Meeting.of(window, against)) is None:
                continue
            numbers = _first_common(
                met.one.unknowns(of_one, window), met.other.unknowns(of_other, against)
            )
            if numbers is not None:
                return met.other.number(numbers)
    return None


@dataclass(frozen=True, slots=True)
class _Window:
    """Names of one length: text around ``digits`` digits, of a number from ``least`` on."""

    before: str
    digits: int
    after: str
    least: int

    @property
    def end(self) -> int:
        return len(self.before) + self.digits

    def __len__(self) -> int:
        return self.end + len(self.after)

    def fixed(self, start: int, end: int) -> str:
        """The text from ``start`` to ``end``, of which no part is in the window."""
        return (self.before + "0" * self.digits + self.after)[start:end]


@dataclass(frozen=True, slots=True)
class _NameProgression:
    """The numbers ``base + unknown * step``, for unknowns from 0 to ``last``."""

    base: int
    step: int
    last: int

    def number(self, unknown: int) -> int:
        return self.base + unknown * self.step

    def unknowns(self, spans: Iterable[Span], window: _Window) -> Iterator[Span]:
        """For which unknowns the number is in one of ``spans``, and in the window."""
        for first, last in spans:
            low = max(first, window.least)
            high = min(last, 10**window.digits - 1)
            # Divided upward and downward.
            found = (
                max(-((self.base - low) // self.step), 0),
                min((high - self.base) // self.step, self.last),
            )
            if found[0] <= found[1]:
                yield found


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The numbers of two windows that have the same name, as functions of one unknown.

    A digit of one that stands where the other has text is that text. The digits that stand
    where the other has digits, too, are the unknown.
    """

    one: _NameProgression
    other: _NameProgression

    @classmethod
    def of(cls, one: _Window, other: _Window) -> _Meeting | None:
        """None if no two names are the same."""
        start = max(len(one.before), len(other.before))
        end = max(min(one.end, other.end), start)
        if len(one) != len(other) or not _same_text(one, other):
            return None
        last = 10 ** (end - start) - 1
        lines = [
            _line(window, text, start, end, last) for window, text in ((one, other), (other, one))
        ]
        if None in lines:
            return None
        return cls(*lines)  # type: ignore[arg-type]  # none of them is None


def _same_text(one: _Window, other: _Window) -> bool:
    """Whether they agree wherever neither has a digit of its number."""
    head = min(len(one.before), len(other.before))
    tail = max(one.end, other.end)
    if one.before[:head] != other.before[:head]:
        return False
    if one.fixed(tail, len(one)) != other.fixed(tail, len(other)):
        return False
    # Windows apart: the text between them.
    between = min(one.end, other.end), max(len(one.before), len(other.before))
    return between[0] >= between[1] or one.fixed(*between) == other.fixed(*between)


def _line(
    window: _Window, text: _Window, start: int, end: int, last: int
) -> _NameProgression | None:
    """The numbers of ``window`` that agree with the text of another; None for none.

    :param start: where the digits begin that both have; they end before ``end``.
    """
    if start == end:
        digits = text.fixed(len(window.before), window.end)
        return _NameProgression(int(digits), 1, 0) if _are_digits(digits) else None
    left, right = text.fixed(len(window.before), start), text.fixed(end, window.end)
    if not _are_digits(left + right):
        return None
    step = 10 ** len(right)
    return _NameProgression(int(left or "0") * step * (last + 1) + int(right or "0"), step, last)


def _are_digits(text: str) -> bool:
    return text == "" or (text.isascii() and text.isdigit())


def _first_common(one: Iterable[Span], other: Iterable[Span]) -> int | None:
    """The smallest number that is in a span of both; each ascends."""
    left, right = iter(one), iter(other)
    first, second = next(left, None), next(right, None)
    while first is not None and second is not None:
        begin = max(first[0], second[0])
        if begin <= min(first[1], second[1]):
            return begin
        if first[1] < second[1]:
            first = next(left, None)
        else:
            second = next(right, None)
    return None
