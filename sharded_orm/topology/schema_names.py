"""The schema names of shard groups: checks their templates, and finds names that two groups share.

A template is the DATABASE_NAME of a group, such as ``photos_{shard:05d}``. A schema's name is a
text that contains one decimal number, the number of the shard. So two groups are compared by their
ranges of numbers, and not shard by shard. This module uses neither Django nor a database driver.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]

# The maximum length of a name on PostgreSQL, in bytes.
_POSTGRESQL_NAME = 63
_EXPECTED = (
    "a template of {shard} (once; with leading zeros as {shard:05d}) and {group}, and nothing else in"
    " braces"
)
# The formats that {shard} may have in a template: none, d, 05 or 05d, where 05 stands for any width
# from 00 to 99. No larger width is needed, because no database allows a name of 100 characters.
_WIDTH = re.compile(r"(?:0([0-9]{1,2}))?d?")


@dataclass(frozen=True, slots=True)
class SchemaNames:
    """The schema names of a shard group.

    Each name consists of the text ``before``, the shard's number, and the text ``after``. A number with
    fewer than ``width`` digits is filled up with leading zeros.
    """

    before: str
    after: str
    width: int

    @classmethod
    def of(cls, template: object, group: str) -> SchemaNames:
        """Return the schema names that ``template`` defines for ``group``.

        :param template: the value of ``DATABASE_NAME`` of the group.
        :param group: the name of the group.
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
        """Yield the names of the shards 0 to ``last``, as windows.

        A window is a set of names that all have the same length.
        """
        for digits in range(self.width, max(self.width, len(str(last))) + 1):
            # A number with more digits than the width has no leading zeros. So the smallest number
            # with two digits is 10, that with three digits is 100, and so on.
            least = 0 if digits == self.width else 10 ** (digits - 1)
            yield _Window(self.before, digits, self.after, least)


def postgresql_name_problems(longest: str, group: str) -> Iterator[str]:
    """Yield a sentence for each reason why a group's schema names cannot be used on PostgreSQL.

    For example, PostgreSQL truncates a long name without an error, so two shards could get the same
    schema.

    :param longest: the longest schema name of the group.
    :param group: the name of the group.
    """
    where = f"group {group!r}: the schema {longest!r}"
    size = len(longest.encode())
    if size > _POSTGRESQL_NAME:
        yield (
            f"{where} has {size} bytes, and PostgreSQL cuts names off after {_POSTGRESQL_NAME}; give the"
            " group a shorter DATABASE_NAME"
        )
    if '"' in longest:
        # Refuse a quote in a name: Django's quote_name() neither quotes a name that begins and ends
        # with a quote, nor escapes a quote inside of a name.
        yield (
            f"{where} has a quote in its name; leave it out of DATABASE_NAME, because names are quoted"
            " in SQL anyway"
        )
    if longest.startswith("pg_"):
        yield (
            f"{where} begins with 'pg_', which PostgreSQL reserves for its own; give the group another"
            " DATABASE_NAME"
        )


def shared_number(
    one: SchemaNames, one_spans: Sequence[Span], other: SchemaNames, other_spans: Sequence[Span]
) -> int | None:
    """Find a schema name that both groups use, and return the number that it has in the second
    group.

    Return None if there is no such name.

    :param one: the schema names of the first group.
    :param one_spans: the shards of the first group to compare, as spans: (first shard, last shard),
        both included. Spans must be sorted and must not overlap. The cost is a few steps per span,
        no matter how many shards it contains.
    :param other: the schema names of the second group.
    :param other_spans: the shards of the second group to compare, as spans.
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
    """A window: the schema names of a shard group whose shard numbers have ``digits`` digits.

    A name consists of the text ``before``, a number with ``digits`` digits that is at least
    ``least``, and the text ``after``. ``len()`` of a window is the length of each of its names.
    """

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
        """Return the characters of a name from position ``start`` up to, but not including, ``end``.

        No digit of the shard's number may be at these positions, so all names of the window have
        the same characters there.
        """
        return (self.before + "0" * self.digits + self.after)[start:end]


@dataclass(frozen=True, slots=True)
class _NameProgression:
    """An arithmetic progression of shard numbers: ``base + unknown * step``.

    It contains one shard number for each integer ``unknown`` from 0 to ``last``.
    """

    base: int
    step: int
    last: int

    def number(self, unknown: int) -> int:
        return self.base + unknown * self.step

    def unknowns(self, spans: Iterable[Span], window: _Window) -> Iterator[Span]:
        """Yield the values of ``unknown`` for which ``base + unknown * step`` is a usable number.

        A shard number is usable if it is in ``spans``, and if one of the names in ``window`` (a set
        of schema names) contains it. The values are yielded as spans: (first, last), both included.
        """
        for first, last in spans:
            low = max(first, window.least)
            high = min(last, 10**window.digits - 1)
            # Convert the span of shard numbers to a span of values of ``unknown``, by dividing by
            # the step. Round up for the first value, and round down for the last value.
            span = (
                max(-((self.base - low) // self.step), 0),
                min((high - self.base) // self.step, self.last),
            )
            if span[0] <= span[1]:
                yield span


@dataclass(frozen=True, slots=True)
class _CommonNames:
    """The schema names that two windows (sets of names, all of one length) have in common.

    For example, the names of the first window consist of the text ``a_1`` and a number with two
    digits: ``a_100`` to ``a_199``. Those of the second window consist of the text ``a_`` and a
    number with three digits: ``a_000`` to ``a_999``. The common names are ``a_100`` to ``a_199``.
    Both windows have digits of the shard number at the last two positions, so any digits are
    possible there. These digits form a number, the ``unknown``, here from 0 to 99. At the position
    before them, only the second window has a digit, and it must be equal to the text ``1``.

    ``one`` computes the shard's number in the first window from the unknown, and ``other`` the
    shard's number in the second window. In the example, ``one`` returns the unknown itself, and
    ``other`` the unknown plus 100.
    """

    one: _NameProgression
    other: _NameProgression

    @classmethod
    def of(cls, one: _Window, other: _Window) -> _CommonNames | None:
        """Return the names that two windows (sets of schema names) have in common.

        Return None if the texts or lengths exclude a common name. The smallest numbers of the
        windows (``least``) are not checked here, but in :meth:`_NameProgression.unknowns`.
        """
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
    """Whether two windows have the same text at all positions at which both have text.

    A window is a set of schema names of one length, which differ only in the digits of the shard's
    number. All other characters are text. The two windows must have the same length.
    """
    head = min(len(one.before), len(other.before))
    tail = max(one.end, other.end)
    if one.before[:head] != other.before[:head]:
        return False
    if one.fixed(tail, len(one)) != other.fixed(tail, len(other)):
        return False
    # The digits of one window may end before the digits of the other begin. Then both windows have
    # text between these digits. Compare this text, too.
    between = min(one.end, other.end), max(len(one.before), len(other.before))
    return between[0] >= between[1] or one.fixed(*between) == other.fixed(*between)


def _progression(
    window: _Window, text: _Window, start: int, end: int, last: int
) -> _NameProgression | None:
    """Return the shard numbers in ``window`` whose schema names may also be in another window.

    All names in a window have the same length, and consist of a text, the digits of the shard
    number, and a second text. At some positions, ``window`` has a digit, but the other window has a
    character of its text. There, the digit must be equal to this character. Return None if the
    character is not a digit, because then the windows have no name in common.

    :param text: the other window, of which only the text is used here.
    :param start: the first position at which both windows have a digit.
    :param end: the position after the last such position; equal to ``start`` if there is none.
    :param last: the largest number that the digits from ``start`` to ``end`` can form.
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
    """Return the smallest number that is in a span of ``one`` and in a span of ``other``.

    Return None if there is no such number. A span is (first, last), both included. The spans in
    each argument must be sorted.
    """
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
