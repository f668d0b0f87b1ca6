"""The names of a group's schemas: valid templates, and names that two groups share.

Pure: no Django, no drivers. A name is text around one decimal number, so two groups are compared
by their ranges of numbers. No shard is visited, however many a document names.
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
# The width has at most two digits: no database has longer names.
_WIDTH = re.compile(r"(?:0([0-9]{1,2}))?d?")


@dataclass(frozen=True, slots=True)
class SchemaNames:
    """Names made of ``before``, a number of at least ``width`` digits, and ``after``."""

    before: str
    after: str
    width: int

    @classmethod
    def of(cls, template: object, group: str) -> SchemaNames:
        """The names of the schemas of ``group``.

        :param template: ``DATABASE_NAME`` of the group.
        :raises ValueError: ``template`` is not valid; the message says what it must be.
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
        """One window for each number of digits that the numbers 0 to ``last`` have."""
        for digits in range(self.width, max(self.width, len(str(last))) + 1):
            # A number with more digits than the width has no leading zero.
            least = 0 if digits == self.width else 10 ** (digits - 1)
            yield _Window(self.before, digits, self.after, least)


def shared_number(
    one: SchemaNames, one_spans: Sequence[Span], other: SchemaNames, other_spans: Sequence[Span]
) -> int | None:
    """A number of ``other_spans`` whose name is also the name of a number of ``one_spans``.

    None if there is no such number. Spans are (first, last), both included; they ascend and do not
    overlap. Costs a few steps per span, however many numbers it has.
    """
    if not one_spans or not other_spans:
        return None
    for window in one._windows(one_spans[-1][1]):
        for other_window in other._windows(other_spans[-1][1]):
            if (common := _CommonNames.of(window, other_window)) is None:
                continue
            unknown = _first_common(
                common.one.unknowns(one_spans, window),
                common.other.unknowns(other_spans, other_window),
            )
            if unknown is not None:
                return common.other.number(unknown)
    return None


@dataclass(frozen=True, slots=True)
class _Window:
    """All names of one length: text around a number of ``digits`` digits, at least ``least``."""

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
        """The text from ``start`` to ``end``, a slice that holds no digit of the number."""
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
        """The spans of unknowns whose number is in one of ``spans`` and in the window."""
        for first, last in spans:
            low = max(first, window.least)
            high = min(last, 10**window.digits - 1)
            # The first is rounded up, the last is rounded down.
            span = (
                max(-((self.base - low) // self.step), 0),
                min((high - self.base) // self.step, self.last),
            )
            if span[0] <= span[1]:
                yield span


@dataclass(frozen=True, slots=True)
class _CommonNames:
    """The numbers of two windows that have the same names, as functions of one unknown.

    If one window has a digit where the other has text, the digit is that text. The digits at
    positions where both windows have digits are the unknown.
    """

    one: _NameProgression
    other: _NameProgression

    @classmethod
    def of(cls, one: _Window, other: _Window) -> _CommonNames | None:
        """The common names of two windows; None if there are none."""
        start = max(len(one.before), len(other.before))
        end = max(min(one.end, other.end), start)
        if len(one) != len(other) or not _same_text(one, other):
            return None
        last = 10 ** (end - start) - 1
        progressions = [
            _progression(window, text, start, end, last)
            for window, text in ((one, other), (other, one))
        ]
        if None in progressions:
            return None
        return cls(*progressions)  # type: ignore[arg-type]  # none of them is None


def _same_text(one: _Window, other: _Window) -> bool:
    """Whether two windows agree at all positions where neither has a digit of its number."""
    head = min(len(one.before), len(other.before))
    tail = max(one.end, other.end)
    if one.before[:head] != other.before[:head]:
        return False
    if one.fixed(tail, len(one)) != other.fixed(tail, len(other)):
        return False
    # The text between the digits of one and those of the other, if they do not overlap.
    between = min(one.end, other.end), max(len(one.before), len(other.before))
    return between[0] >= between[1] or one.fixed(*between) == other.fixed(*between)


def _progression(
    window: _Window, text: _Window, start: int, end: int, last: int
) -> _NameProgression | None:
    """The numbers of ``window`` that agree with the text of another window; None if there are none.

    :param start: the position of the first digit that both have.
    :param end: the position after the last digit that both have.
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
    """The smallest number that is in a span of both; None if there is none. Both ascend."""
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
