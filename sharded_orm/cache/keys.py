"""Names of the entries in the cache (Yupoo, Y13-Y16). Pure: no Django, no driver.

======  ============================================  =======================
entry   of a sharded model                            of a global model
======  ============================================  =======================
object  ``Photo-{key}-{pk}``                          ``Photo-{pk}``
list    ``Photo-list-{key}-{query}-{revision}``       ``Photo-list-{query}-{revision}``
guard   ``Photo-@{shard}-revision`` of the table      ``Photo-revision``
guard   ``Photo-{key}-revision``
guard   ``Photo-{key}-{isolate}-revision``            ``Photo-{isolate}-revision``
======  ============================================  =======================

A *token* stands for each value in a name (:func:`token`), so no value can make one name look
like another. :func:`fit` shortens each name, so memcached accepts it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Any
from urllib.parse import quote
from uuid import UUID

MAX_LENGTH = 250  # bytes; the limit of memcached
_MAX_TOKEN = 64
_RESERVED = frozenset({"revision", "list"})
_SAFE = re.compile(rf"[0-9A-Za-z_.]{{1,{_MAX_TOKEN}}}")


def token(value: Any) -> str:
    """A value as a part of a name: printable ASCII without ``-``, at most 64 characters.

    Different values of one field (as its ``get_prep_value`` gives them) have different
    tokens, and values that are equal to the database have the same token. Long values are
    hashed. Texts are equal here if they are the same: do not use a collation for keys that
    says otherwise.
    """
    if isinstance(value, int):  # True is 1, as in the database
        value = int(value)
        return str(value) if value >= 0 else f"%2D{-value}"
    if isinstance(value, str):
        text = str.__str__(value)  # of an enumeration: its value, not its name
    elif isinstance(value, bytes | bytearray | memoryview):
        text = bytes(value).hex()
    elif isinstance(value, Decimal):
        text = _decimal(value)
    elif isinstance(value, float):
        text = repr(value + 0.0)  # no negative zero
    elif isinstance(value, datetime) and value.utcoffset() is not None:
        text = value.astimezone(UTC).isoformat()
    elif isinstance(value, datetime | date | time):
        text = value.isoformat()
    elif isinstance(value, UUID):
        text = value.hex
    else:
        text = str(value)
    if _SAFE.fullmatch(text) and text not in _RESERVED:
        return text
    safe = quote(text, safe="", errors="surrogatepass").replace("-", "%2D").replace("~", "%7E")
    if safe in _RESERVED or not safe:
        # The empty text has a token, too, that no other text has.
        safe = f"%{ord(safe[0]):02X}{safe[1:]}" if safe else "%"
    if len(safe) > _MAX_TOKEN:
        return "~" + hashlib.blake2b(safe.encode(), digest_size=16).hexdigest()
    return safe


def _decimal(value: Decimal) -> str:
    """One text for 1, 1.0 and 1E0. ``Decimal.normalize()`` would round."""
    if not value.is_finite():
        return str(value)
    sign, digits, exponent = value.as_tuple()
    number = "".join(map(str, digits)).lstrip("0")
    stripped = number.rstrip("0")
    if not stripped:
        return "0"
    scale = int(exponent) + len(number) - len(stripped)
    return f"{'-' if sign else ''}{stripped}e{scale}"


def fit(name: str) -> str:
    """``name``; its beginning with a digest if it is too long for memcached."""
    if len(name) <= MAX_LENGTH:
        return name
    return name[:100] + "~" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def node_index(place: str, count: int) -> int:
    """The position among ``count`` cache servers of the one that holds all entries of ``place``.

    It is fixed: no other server takes over while that one is down.
    """
    if count == 1:
        return 0
    return int.from_bytes(hashlib.md5(place.encode(), usedforsecurity=False).digest()[:8]) % count


@dataclass(frozen=True, slots=True)
class CachedType:
    """The part of a cached model that names and values in the cache depend on.

    :param name: the prefix and ``app_label.ModelName`` of the concrete model.
    :param sharded: whether rows are in shards; else they are in the global database.
    :param fingerprint: of its fields. It stands in object values and list names, never in
        guards or object names: in a rolling deploy old and new code mark the same guards.
    """

    name: str
    sharded: bool
    fingerprint: str

    def __post_init__(self) -> None:
        # A prefix can be any text, and class names can have letters of any script.
        safe = quote(self.name, safe="@:/+", errors="surrogatepass").replace("~", "%7E")
        object.__setattr__(self, "name", safe)


@dataclass(frozen=True)
class Scope:
    """The rows of a table on a shard, of a shard key, or of an isolate key.

    One *guard* stands for them: an entry that changes with each write to these rows.

    :param place: the shard's alias; the name of the type if it is global. It decides which
        cache server has the entries.
    :param key: token of the shard key; None for the whole table, and for a global type.
    :param isolate: token of the isolate key, which divides the lists of a shard key; None for
        all rows.
    """

    type: CachedType
    place: str
    key: str | None = None
    isolate: str | None = None

    def __post_init__(self) -> None:
        if self.key is None and self.isolate is not None and self.type.sharded:
            raise ValueError("An isolate key is one of a shard key.")

    @cached_property
    def guards(self) -> tuple[str, ...]:
        """Names of its guards, widest first; the last one is its own."""
        name = self.type.name
        if not self.type.sharded:
            guards = [f"{name}-revision"]
            stem = name
        else:
            guards = [f"{name}-@{token(self.place)}-revision"]
            stem = f"{name}-{self.key}"
            if self.key is not None:
                guards.append(f"{stem}-revision")
        if self.isolate is not None:
            guards.append(f"{stem}-{self.isolate}-revision")
        return tuple(map(fit, guards))

    @cached_property
    def home(self) -> int:
        """Index in :attr:`guards` of the *home* guard, which stands for the objects.

        It is that of the shard key, or of a global table. The scope of a whole table on a shard
        has no such guard, so the index is out of range there.
        """
        return 1 if self.type.sharded else 0

    @cached_property
    def _stem(self) -> str:
        if not self.type.sharded:
            return self.type.name
        if self.key is None:
            raise ValueError("Objects and lists of a sharded model have a shard key.")
        return f"{self.type.name}-{self.key}"

    def object_name(self, pk: str) -> str:
        """The name of the object whose primary key has the token ``pk``."""
        return fit(f"{self._stem}-{pk}")

    def list_name(self, query: str, revision: str) -> str:
        """The name of a list or count. ``query`` is a digest that includes the fingerprint."""
        stem = f"{self.type.name}-list{self._stem[len(self.type.name) :]}"
        return fit(f"{stem}-{query}-{revision}")
