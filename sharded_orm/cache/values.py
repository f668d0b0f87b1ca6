"""What stands under the names of objects, lists and counts. Pure: no Django, no driver.

Yupoo (Y13) keeps pickled model instances. A value here is one line of text and then the
fields as the database driver gave them, in JSON, so reading one runs no code, whatever
stands there::

    o1 {fingerprint} {stamp} {name} {fields}{checksum}
    l1 {fingerprint} - {name} {fields}{checksum}

``name`` is the name of the entry, so that a copy under another name does not count. The
fields are the inside of a JSON array, and no bracket is ever in it (one in a text is escaped):
so many values are read by one call of the JSON parser, and none of them can pass as a part of
its neighbour. The last element has one letter for each field (:data:`_CARRIED`); what has the
letter ``.`` is plain JSON. The checksum, four bytes, finds accidents; it is no signature.
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

#: One of Django's converters may read what is stored in another way one day: part of the
#: fingerprint of a model.
FORMAT: Final = 1

#: As a driver gives it, in the order of the model's concrete fields.
Row = Sequence[Any]

_OBJECT, _LIST = "o1", "l1"
#: Another version of this format, or this one.
_OURS = re.compile(rb"[ol][0-9]{1,4} [0-9a-f]+ [0-9a-f-]+ [!-~]+ ")
_MICROSECOND = timedelta(microseconds=1)
#: A number of more digits than any column has is an attempt to keep a processor busy.
_MOST_DIGITS = 1000


class Unusable(Enum):
    """Why an entry does not count."""

    #: There is none; or it is of an earlier generation, or of another version of the model.
    MISS = "miss"
    #: It is not what the library stores under this name.
    BROKEN = "broken"


MISS: Final = Unusable.MISS
BROKEN: Final = Unusable.BROKEN


class _Foreign(Exception):
    """A value that cannot be carried, or not without a loss."""


def _zone_is_exact(value: datetime | time) -> bool:
    return not value.fold and (value.tzinfo is None or type(value.tzinfo) is timezone)


def _pack_time(value: datetime | time) -> str:
    if not _zone_is_exact(value):
        raise _Foreign
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


#: What has a letter of its own: how it becomes JSON. The type is exact: an instance of a
#: subclass is not what would come back.
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
# Control characters in a text are refused (strict), so no text goes on behind an entry's end.
_load = json.JSONDecoder(object_pairs_hook=_no_object, strict=True).decode
#: What reading hostile text raises: ValueError (syntax, numbers of thousands of digits,
#: UTF-8), RecursionError (nesting), and the rest by the constructors in ``_BACK``.
_DAMAGE = (ValueError, TypeError, AttributeError, RecursionError, OverflowError, InvalidOperation)


def pack_object(name: str, fingerprint: str, stamp: str, row: Row) -> bytes | None:
    """The value of an object.

    :param name: under which it will stand.
    :param fingerprint: of the model's fields, hexadecimal.
    :param stamp: :func:`~sharded_orm.cache.guards.stamp` of its guards.
    :param row: its fields, before Django's converters.
    :returns: None if a field has a value that cannot be carried: then it is not cached.
    """
    return _pack(_prefix(_OBJECT, fingerprint, stamp, name), row)


def unpack_objects(
    raws: Sequence[bytes | None],
    names: Sequence[str],
    fingerprint: str,
    stamp: str,
    width: int,
) -> list[list[Any] | Unusable]:
    """The rows of objects, in order.

    :param raws: what stands under ``names``; None for nothing.
    :param width: the number of the model's fields.
    """
    start = f"{_OBJECT} {fingerprint} {stamp} "
    found: list[list[Any] | Unusable] = []
    bodies: list[bytes] = []
    places: list[int] = []
    for place, (raw, name) in enumerate(zip(raws, names, strict=True)):
        if not raw:
            found.append(MISS)
            continue
        prefix = f"{start}{name} ".encode()
        if not raw.startswith(prefix):
            found.append(_other(raw, start))
            continue
        if crc32(raw) == _WHOLE:
            places.append(place)
            bodies.append(raw[len(prefix) : -4])
        found.append(BROKEN)  # until it is read
    if bodies:
        for place, row in zip(places, _rows(bodies), strict=True):
            if row is not None and len(row) == width:
                found[place] = row
    return found


def pack_list(name: str, fingerprint: str, values: Iterable[Any]) -> bytes | None:
    """The value of a list of primary keys, or of a count (a list of one number).

    :param name: under which it will stand; it holds the revision.
    :param values: raw, as the driver gave them.
    :returns: None if one of them cannot be carried.
    """
    return _pack(_prefix(_LIST, fingerprint, "-", name), tuple(values))


def unpack_list(raw: bytes | None, name: str, fingerprint: str) -> list[Any] | Unusable:
    """What :func:`pack_list` was given."""
    if not raw:
        return MISS
    prefix = _prefix(_LIST, fingerprint, "-", name)
    if not raw.startswith(prefix):
        return _other(raw, f"{_LIST} {fingerprint} - ")
    if crc32(raw) != _WHOLE:
        return BROKEN
    row = _rows([raw[len(prefix) : -4]])[0]
    return BROKEN if row is None else row


def _prefix(kind: str, fingerprint: str, stamp: str, name: str) -> bytes:
    return f"{kind} {fingerprint} {stamp} {name} ".encode()


def _other(raw: bytes, start: str) -> Unusable:
    """What an entry is that does not begin as expected."""
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
            except _Foreign:
                return None
        letters = "".join(marks)
    fields.append(letters)
    try:
        text = _dump(fields)[1:-1]
    except ValueError:  # an integer of thousands of digits
        return None
    if "[" in text or "]" in text:
        # They can only be inside of texts, and never behind an open backslash: dumping has
        # doubled every backslash of a text.
        text = text.replace("[", "\\u005b").replace("]", "\\u005d")
    whole = prefix + text.encode("utf-8", "surrogatepass")
    return whole + crc32(whole).to_bytes(4, "little")


def _rows(bodies: list[bytes]) -> list[list[Any] | None]:
    """Rows of entries whose checksum is right; None for what is no row after all."""
    count = len(bodies)
    rows: list[Any]
    try:
        text = b"],\n[".join(bodies).decode("utf-8", "surrogatepass")
        # Every bracket is ours, and no text in it spans a line: so each entry is one element.
        if text.count("[") != count - 1 or text.count("]") != count - 1:
            raise ValueError("brackets")
        rows = _load(f"[[{text}]]")
    except _DAMAGE:
        if count == 1:
            return [None]
        # At least one is damaged; the others count.
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
