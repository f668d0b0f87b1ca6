"""The values of objects, lists and counts in the cache. Pure: no Django, no driver.

Yupoo (Y13) keeps pickled model instances. A value here is one line of text and then the
fields as the database driver gave them, in JSON, so reading a value never runs its code::

    o1 {fingerprint} {stamp} {name} {fields}{checksum}
    l1 {fingerprint} - {name} {fields}{checksum}

``name`` is the name of the entry, so that a copy under another name does not count. The
fields are the inside of a JSON array without any bracket (brackets in texts are escaped). So one
call of the JSON parser reads many values, and no value can pass as a part of its neighbour. The
last element has one letter for each field (:data:`_CARRIED`); ``.`` stands for plain JSON. The
checksum of four bytes finds accidents; it is no signature.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import lru_cache
from typing import Any, Final
from uuid import UUID
from zlib import crc32

#: A part of the fingerprint of each model, to be raised when stored rows are read differently:
#: by this module, or by one of Django's converters.
FORMAT: Final = 1

#: A row as a driver gives it, in the order of the model's concrete fields.
Row = Sequence[Any]

_OBJECT, _LIST = "o1", "l1"
#: The beginning of a value of this format, or of another version of it.
_OURS = re.compile(rb"[ol][0-9]{1,4} [0-9a-f]+ [0-9a-f-]+ [!-~]+ ")
_MICROSECOND = timedelta(microseconds=1)
#: No column has more digits: a longer number only keeps a processor busy.
_MOST_DIGITS = 1000


class Unusable(Enum):
    """Why an entry cannot be used."""

    #: It is missing, of an earlier generation, or of another version of the model.
    MISS = "miss"
    #: The library does not store such a value under this name.
    BROKEN = "broken"


MISS: Final = Unusable.MISS
BROKEN: Final = Unusable.BROKEN


class _NotExact(Exception):
    """A value that would not come back as it was."""


def _zone_is_exact(value: datetime | time) -> bool:
    return not value.fold and (value.tzinfo is None or type(value.tzinfo) is timezone)


def _pack_time(value: datetime | time) -> str:
    if not _zone_is_exact(value):
        raise _NotExact
    return value.isoformat()


def _pack_bytes(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _unpack_bytes(text: Any) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


def _unpack_decimal(text: Any) -> Decimal:
    if type(text) is not str:
        raise ValueError(text)
    number = Decimal(text)
    if number.is_finite() and abs(number.adjusted()) > _MOST_DIGITS:
        raise ValueError("exponent")
    return number


def _pack_interval(value: timedelta) -> int:
    return value // _MICROSECOND


def _unpack_interval(number: Any) -> timedelta:
    if type(number) is not int:
        raise ValueError(number)
    return timedelta(microseconds=number)


#: By type: the letter, and the function that makes it JSON. The type is exact, as an instance
#: of a subclass would come back as one of the type.
_CARRIED: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("b", _pack_bytes),
    Decimal: ("n", str),
    datetime: ("t", _pack_time),
    date: ("d", date.isoformat),
    time: ("c", _pack_time),
    timedelta: ("i", _pack_interval),
    UUID: ("u", str),
}
_BACK: dict[str, Callable[[Any], Any]] = {
    "b": _unpack_bytes,
    "n": _unpack_decimal,
    "t": datetime.fromisoformat,
    "d": date.fromisoformat,
    "c": time.fromisoformat,
    "i": _unpack_interval,
    "u": UUID,
}
#: The CRC-32 of anything that ends with its own CRC-32.
_WHOLE = 0x2144DF1C
_PLAIN = frozenset({type(None), bool, int, float, str})


def _no_object(_: Any) -> Any:
    raise ValueError("no field is an object")


_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Strict refuses control characters in a text, so no text goes on behind an entry's end.
_load = json.JSONDecoder(object_pairs_hook=_no_object, strict=True).decode
#: Errors of reading hostile text: ValueError (syntax, numbers of thousands of digits, UTF-8),
#: RecursionError (nesting), and those of the constructors in ``_BACK``.
_DAMAGE = (ValueError, TypeError, AttributeError, RecursionError, OverflowError, InvalidOperation)


def pack_object(name: str, fingerprint: str, stamp: str, row: Row) -> bytes | None:
    """The value of an object.

    :param name: the name of its entry.
    :param fingerprint: of the model's fields, hexadecimal.
    :param stamp: :func:`~sharded_orm.cache.guards.stamp` of its guards.
    :param row: its fields, before Django's converters.
    :returns: None if the format does not know the type of a field's value: such an object is
        not cached.
    """
    return _pack(_prefix(_OBJECT, fingerprint, stamp, name), row)


def unpack_objects(
    raws: Sequence[bytes | None],
    names: Sequence[str],
    fingerprint: str,
    stamp: str,
    width: int,
) -> list[list[Any] | Unusable]:
    """The rows of objects, in order; why there is none for each that cannot be used.

    :param raws: the values of the entries ``names``; None for a missing entry.
    :param width: the number of the model's fields.
    """
    start = f"{_OBJECT} {fingerprint} {stamp} "
    rows: list[list[Any] | Unusable] = []
    bodies: list[bytes] = []
    positions: list[int] = []
    for position, (raw, name) in enumerate(zip(raws, names, strict=True)):
        if not raw:
            rows.append(MISS)
            continue
        prefix = f"{start}{name} ".encode()
        if not raw.startswith(prefix):
            rows.append(_why_unusable(raw, start))
            continue
        if crc32(raw) == _WHOLE:
            positions.append(position)
            bodies.append(raw[len(prefix) : -4])
        rows.append(BROKEN)  # until it is parsed
    if bodies:
        for position, row in zip(positions, _rows(bodies), strict=True):
            if row is not None and len(row) == width:
                rows[position] = row
    return rows


def pack_list(name: str, fingerprint: str, values: Iterable[Any]) -> bytes | None:
    """The value of a list of primary keys, or of a count (a list of one number).

    :param name: the name of its entry, which holds the revision.
    :param values: as the driver gave them.
    :returns: None if the format does not know the type of one of them.
    """
    return _pack(_prefix(_LIST, fingerprint, "-", name), tuple(values))


def unpack_list(raw: bytes | None, name: str, fingerprint: str) -> list[Any] | Unusable:
    """The values that :func:`pack_list` was given; why there are none if it cannot be used."""
    if not raw:
        return MISS
    prefix = _prefix(_LIST, fingerprint, "-", name)
    if not raw.startswith(prefix):
        return _why_unusable(raw, f"{_LIST} {fingerprint} - ")
    if crc32(raw) != _WHOLE:
        return BROKEN
    row = _rows([raw[len(prefix) : -4]])[0]
    return BROKEN if row is None else row


def _prefix(kind: str, fingerprint: str, stamp: str, name: str) -> bytes:
    return f"{kind} {fingerprint} {stamp} {name} ".encode()


def _why_unusable(raw: bytes, start: str) -> Unusable:
    """Why an entry cannot be used that does not begin with its prefix."""
    if raw.startswith(start.encode()):
        return BROKEN  # of this generation and version, but of another name: a copy
    return MISS if raw.startswith(start[:1].encode()) and _OURS.match(raw) else BROKEN


def _pack(prefix: bytes, row: Row) -> bytes | None:
    fields = list(row)
    letters = "." * len(fields)
    if not _PLAIN.issuperset(map(type, fields)):
        marks = ["."] * len(fields)
        for index, value in enumerate(fields):
            if type(value) in _PLAIN:
                continue
            if (carried := _CARRIED.get(type(value))) is None:
                return None
            try:
                marks[index], fields[index] = carried[0], carried[1](value)
            except _NotExact:
                return None
        letters = "".join(marks)
    fields.append(letters)
    try:
        text = _dump(fields)[1:-1]
    except ValueError:  # an integer of thousands of digits
        return None
    if "[" in text or "]" in text:
        # They are inside of texts, and never escaped: dumping has doubled every backslash.
        text = text.replace("[", "\\u005b").replace("]", "\\u005d")
    value = prefix + text.encode("utf-8", "surrogatepass")
    return value + crc32(value).to_bytes(4, "little")


def _rows(bodies: list[bytes]) -> list[list[Any] | None]:
    """The rows of values with a valid checksum; None for each that is no row after all."""
    count = len(bodies)
    rows: list[Any]
    try:
        text = b"],\n[".join(bodies).decode("utf-8", "surrogatepass")
        # Every bracket is ours, and no text spans a line: so each value is one element.
        if text.count("[") != count - 1 or text.count("]") != count - 1:
            raise ValueError("brackets")
        rows = _load(f"[[{text}]]")
    except _DAMAGE:
        if count == 1:
            return [None]
        # At least one is damaged; the others can be used.
        return [_rows([body])[0] for body in bodies]
    for index, row in enumerate(rows):
        letters = row.pop() if row else None
        if type(letters) is not str or len(letters) != len(row):
            rows[index] = None
        elif letters.strip("."):
            try:
                for column, convert in _conversions(letters):
                    row[column] = convert(row[column])
            except (*_DAMAGE, KeyError):
                rows[index] = None
    return rows


@lru_cache(maxsize=1024)
def _conversions(letters: str) -> list[tuple[int, Callable[[Any], Any]]]:
    return [(column, _BACK[letter]) for column, letter in enumerate(letters) if letter != "."]
