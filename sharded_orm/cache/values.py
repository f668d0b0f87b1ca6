"""The format of objects and lists in the cache. Uses neither Django nor a driver.

An object is one cached row: its fields, as the database driver gave them. A list is the cached
result of a query: primary keys, or one number for ``count()`` or ``exists()``. Both are stored as
JSON, so reading them never runs code from the cache. (Yupoo, Y13, stored pickled model instances.)
The format of an object (``o1``) and of a list (``l1``)::

    o1 {fingerprint} {stamp} {name} {fields}{checksum}
    l1 {fingerprint} - {name} {fields}{checksum}

- ``fingerprint`` is a digest of the model's fields.
- ``stamp`` has the generations (random digests) of the object's guards, the entries that say
  whether other entries are valid. The object is valid while the guards have these generations. A
  list has ``-`` here, and a digest of its guards in its name.
- ``name`` is the name of the entry. If the server returns an entry under another name, the library
  notices it.
- ``fields`` is a JSON array without its outer brackets. Brackets in texts are escaped, so that
  ``fields`` has no bracket at all. The library joins the fields of many entries into one text, and
  parses it with one call; a damaged entry cannot change how the next one is read. The last element
  of the array is a text with one character for each field. A letter says how the field was encoded
  (:data:`_CARRIED`); ``.`` says that the field is a plain JSON value.
- ``checksum`` has four bytes. It detects accidents; it is not a signature.
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

#: The version of the format. Increase it when this module, or a converter of Django, begins to
#: interpret stored rows differently. Each model's fingerprint contains the version, so that entries
#: of the old version are no longer used.
FORMAT: Final = 1

#: A row: one value for each concrete field of the model, in their order.
Row = Sequence[Any]

_OBJECT, _LIST = "o1", "l1"
#: Matches the beginning of an object or list of this library, in any version of the format.
_OURS = re.compile(rb"[ol][0-9]{1,4} [0-9a-f]+ [0-9a-f-]+ [!-~]+ ")
_MICROSECOND = timedelta(microseconds=1)
#: The largest exponent of a decimal number that is read from the cache. No column needs a larger
#: one. A damaged entry could have a huge exponent, and computing with it would take very long.
_MOST_DIGITS = 1000


class Unusable(Enum):
    """The reason why an entry cannot be used."""

    #: The entry is missing, was made void by a write, or was stored when the model had different
    #: fields.
    MISS = "miss"
    #: The entry is damaged, or was not stored under this name by the library.
    BROKEN = "broken"


MISS: Final = Unusable.MISS
BROKEN: Final = Unusable.BROKEN


class _NotExact(Exception):
    """Raised if storing a value would change it, such as a time with a named time zone."""


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


#: Maps each type that JSON lacks to a pair: the letter that stands for the type in an entry, and
#: the function that turns a value into a JSON value. A row with a value of a subclass is not
#: cached, because the value would be read as one of the base class.
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
#: The CRC-32 of every undamaged entry. An entry ends with the CRC-32 of all bytes before it. It is
#: a property of CRC-32 that the CRC-32 of bytes with this ending is always the same constant.
_WHOLE = 0x2144DF1C
_PLAIN = frozenset({type(None), bool, int, float, str})
_STORABLE = _PLAIN.union(_CARRIED)


def are_storable(rows: Iterable[Row]) -> bool:
    """Whether all values of ``rows`` have types that an entry can hold. All these types are immutable.

    A driver may also return mutable values, such as the list of an array column.
    """
    return all(_STORABLE.issuperset(map(type, row)) for row in rows)


def _no_object(_: Any) -> Any:
    raise ValueError("no field is an object")


_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# strict=True refuses control characters inside JSON strings. So a string that lost its closing
# quote cannot go on past the line end that _rows() puts between two entries.
_load = json.JSONDecoder(object_pairs_hook=_no_object, strict=True).decode
#: The errors that parsing hostile bytes can raise. ValueError: bad syntax, bad UTF-8, or numbers of
#: thousands of digits. RecursionError: deep nesting. The other errors come from the functions in
#: ``_BACK``, which turn JSON values into Python values.
_DAMAGE = (ValueError, TypeError, AttributeError, RecursionError, OverflowError, InvalidOperation)


def pack_object(name: str, fingerprint: str, stamp: str, row: Row) -> bytes | None:
    """Return a row in the format of an object.

    :param name: the name of the object's entry.
    :param fingerprint: the hexadecimal digest of the model's fields.
    :param stamp: the generations (random digests) of the object's guards, joined by
        :func:`~sharded_orm.cache.guards.stamp`.
    :param row: the fields of the row as the driver gave them, before Django's converters.
    :returns: the bytes to store; None if the row has a value that the format cannot hold exactly.
        Such an object is not cached.
    """
    return _pack(_prefix(_OBJECT, fingerprint, stamp, name), row)


def unpack_objects(
    raws: Sequence[bytes | None],
    names: Sequence[str],
    fingerprint: str,
    stamp: str,
    width: int,
) -> list[list[Any] | Unusable]:
    """Return the rows of objects, in the order of ``names``.

    For an unusable object, the item is the reason (:class:`Unusable`) and not a row.

    :param raws: the bytes of the entries ``names``; None for a missing entry.
    :param fingerprint: the digest of the model's fields that the objects must carry.
    :param stamp: the stamp that the objects must carry: the present generations of their guards,
        the entries that say whether objects are valid.
    :param width: the number of the model's concrete fields.
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
        # Add BROKEN for now. The code below replaces it by the row if the entry can be parsed.
        rows.append(BROKEN)
    if bodies:
        for position, row in zip(positions, _rows(bodies), strict=True):
            if row is not None and len(row) == width:
                rows[position] = row
    return rows


def pack_list(name: str, fingerprint: str, values: Iterable[Any]) -> bytes | None:
    """Return the bytes to store for the result of a query: primary keys, or a number.

    :param name: the name of the list's entry, which contains a digest of the list's guards.
    :param fingerprint: the hexadecimal digest of the model's fields.
    :param values: the primary keys, each in the form that it has in names of entries; or one number
        for the result of ``count()`` or ``exists()``.
    :returns: the bytes to store; None if the format cannot hold one of ``values`` exactly.
    """
    return _pack(_prefix(_LIST, fingerprint, "-", name), tuple(values))


def unpack_list(raw: bytes | None, name: str, fingerprint: str) -> list[Any] | Unusable:
    """Return the values that :func:`pack_list` stored; or the reason why ``raw`` is unusable.

    :param raw: the bytes of the entry; None for a missing entry.
    :param name: the name of the entry.
    :param fingerprint: the digest of the model's fields that the list must carry.
    """
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
    """Return the reason why an entry that does not begin as expected cannot be used.

    :param raw: the bytes of the entry.
    :param start: the expected beginning of the entry, without the name.
    """
    if raw.startswith(start.encode()):
        # Everything before the name is as expected. So the name must be another one: the server has
        # returned the value of another entry.
        return BROKEN
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
    except ValueError:
        # Python refuses to turn an integer of thousands of digits into text. A row with such an
        # integer is not stored.
        return None
    if "[" in text or "]" in text:
        # Escape all brackets. _rows() parses several entries at once, as arrays, and a bracket in a
        # damaged text could end such an array. The fields are never arrays, so all brackets here
        # are inside JSON strings, where escapes are allowed. A backslash before a bracket does no
        # harm, because _dump() has doubled it.
        text = text.replace("[", "\\u005b").replace("]", "\\u005d")
    value = prefix + text.encode("utf-8", "surrogatepass")
    return value + crc32(value).to_bytes(4, "little")


def _rows(bodies: list[bytes]) -> list[list[Any] | None]:
    """Return the rows that the JSON texts ``bodies`` encode; None for each text that is damaged.

    :param bodies: the part ``fields`` of each entry. The caller has verified the checksums.
    """
    count = len(bodies)
    rows: list[Any]
    try:
        text = b"],\n[".join(bodies).decode("utf-8", "surrogatepass")
        # Parse all entries at once, as elements of one outer array. For this, each entry must be
        # exactly one element. It is, if its JSON text has no bracket, and if no string in it
        # continues after the line end (the parser refuses that).
        if text.count("[") != count - 1 or text.count("]") != count - 1:
            raise ValueError("brackets")
        rows = _load(f"[[{text}]]")
    except _DAMAGE:
        if count == 1:
            return [None]
        # At least one entry is damaged. So parse each entry separately, to use the undamaged ones.
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
