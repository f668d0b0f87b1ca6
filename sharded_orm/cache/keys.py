"""Names of the entries in the cache (Yupoo, Y13-Y16). Uses neither Django nor a driver.

======  ============================================  =======================
entry   of a sharded model                            of a global model
======  ============================================  =======================
object  ``Photo-{key}-{pk}``                          ``Photo-{pk}``
list    ``Photo-list-{key}-{query}-{revision}``       ``Photo-list-{query}-{revision}``
guard   ``Photo-@{shard}-revision`` of the table      ``Photo-revision``
guard   ``Photo-{key}-revision``
guard   ``Photo-{key}-{isolate}-revision``            ``Photo-{isolate}-revision``
======  ============================================  =======================

An *object* is one cached row, a *list* is the result of a query. A *guard* is the entry that says
whether objects and lists are still valid. It changes with each write. There is one guard for the
table on each shard, one for each shard key, and one for each value of the isolate key, the field
that divides the lists of a shard key.

In a name, each value has the form of a *token* (:func:`token`). Two different values never give the
same name. :func:`fit` shortens names that are too long for memcached.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import quote
from uuid import UUID

# The longest name of an entry, in bytes: memcached's limit.
MAX_LENGTH = 250
_MAX_TOKEN = 64
_RESERVED = frozenset({"revision", "list"})
_SAFE = re.compile(rf"[0-9A-Za-z_.]{{1,{_MAX_TOKEN}}}")


def token(value: Any) -> str:
    """Return the form of ``value`` in names of entries: printable ASCII without ``-``, 64
    characters at most. Longer values are hashed.

    Values that are equal in the database have the same token, and different values have different
    tokens. There is one exception. A collation may take different texts for equal, for example
    texts that differ only in case. Such texts have different tokens nevertheless. So the column of
    a key must not have such a collation.

    :param value: a field value, as ``get_prep_value`` of the field returns it.
    """
    if isinstance(value, int):
        # A bool is an int, too. Turn True into 1, as the database does.
        value = int(value)
        return str(value) if value >= 0 else f"%2D{-value}"
    if isinstance(value, str):
        # The value may be a member of an enumeration of texts (``class Color(str, Enum)``). Then
        # str.__str__() returns its value, but str() may return its name.
        text = str.__str__(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        text = bytes(value).hex()
    elif isinstance(value, Decimal):
        text = _decimal(value)
    elif isinstance(value, float):
        # Adding 0.0 turns -0.0 into 0.0. The two are equal, so they must have the same token.
        text = repr(value + 0.0)
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
        # "revision" and "list" have a special meaning in names, so escape their first character.
        # The empty text becomes "%", which is the token of no other text.
        safe = f"%{ord(safe[0]):02X}{safe[1:]}" if safe else "%"
    if len(safe) > _MAX_TOKEN:
        return "~" + hashlib.blake2b(safe.encode(), digest_size=16).hexdigest()
    return safe


def _decimal(value: Decimal) -> str:
    """Return ``value`` as text. Equal numbers, such as 1, 1.0 and 1E0, have the same text.

    ``Decimal.normalize()`` would round long numbers.
    """
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
    """Return ``name`` if it is short enough for memcached. Otherwise return its first 100
    characters, followed by a digest of the whole name.
    """
    if len(name) <= MAX_LENGTH:
        return name
    return name[:100] + "~" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def node_index(place: str, count: int) -> int:
    """Return the index of the cache server that holds all entries of ``place``.

    The index depends only on the arguments, and not on which servers are up. So no other server
    takes over while this server is down. Otherwise, this server would not learn of the writes of
    that time, and would later return stale entries.

    :param place: the alias of a shard, or the type name of a global model.
    :param count: the number of cache servers.
    """
    if count == 1:
        return 0
    return int.from_bytes(hashlib.md5(place.encode(), usedforsecurity=False).digest()[:8]) % count


@dataclass(frozen=True, slots=True)
class CachedType:
    """What the cache needs to know about a cached model.

    :param name: the prefix of all names, then ``app_label.ModelName`` of the concrete model.
    :param sharded: whether the rows are on shards; otherwise they are in the global database.
    :param fingerprint: a digest of the model's fields. Objects and lists contain it, and so do the
        names of lists. The names of objects and guards do not contain it, because old and new code
        must use the same guards during a rolling deploy.
    """

    name: str
    sharded: bool
    fingerprint: str

    def __post_init__(self) -> None:
        # Escape special characters, because the prefix may be any text, and names of classes may
        # have letters that are not ASCII.
        safe = quote(self.name, safe="@:/+", errors="surrogatepass").replace("~", "%7E")
        object.__setattr__(self, "name", safe)


@lru_cache(maxsize=8192)
def _table_guard(type: CachedType, place: str) -> str:
    """Return the name of the guard of a whole table.

    :param place: the alias of the shard; it is not a part of the name for a global model.
    """
    return fit(f"{type.name}-@{token(place)}-revision" if type.sharded else f"{type.name}-revision")


@dataclass(frozen=True)
class Scope:
    """A scope: a set of rows of one cached model that have one guard.

    The set is a whole table on a shard, a whole global table, the rows of one shard key, or those
    of one isolate key (a value of the field that divides the rows of a shard key).

    :param place: the alias of the shard; for a global model, the name of ``type``. The place
        decides which cache server has the entries.
    :param key: the token of the shard key (its form in names of entries). None (the default) for a
        whole table, and for a global model.
    :param isolate: the token of the isolate key. None (the default) for the rows of all isolate
        keys.
    """

    type: CachedType
    place: str
    key: str | None = None
    isolate: str | None = None

    def __post_init__(self) -> None:
        if self.key is None and self.isolate is not None and self.type.sharded:
            raise ValueError("An isolate key is one of a shard key.")

    @property
    def home(self) -> int:
        """The index of the *home* guard in :attr:`guards`: the guard that decides whether a cached
        row is valid.

        For a sharded model, it is the guard of the shard key; for a global model, that of the
        table. The scope of a whole table on a shard has no home guard, so the index is out of
        range.
        """
        return 1 if self.type.sharded else 0

    @cached_property
    def guards(self) -> tuple[str, ...]:
        """The names of all guards on which entries of the scope depend. A guard is the entry that
        says whether other entries are valid.

        They are sorted from the widest set of rows (the table) to the narrowest. The last one is
        the scope's own guard.
        """
        guards = [_table_guard(self.type, self.place)]
        stem = self.type.name
        if self.type.sharded:
            stem = f"{stem}-{self.key}"
            if self.key is not None:
                guards.append(fit(f"{stem}-revision"))
        if self.isolate is not None:
            guards.append(fit(f"{stem}-{self.isolate}-revision"))
        return tuple(guards)

    @cached_property
    def _stem(self) -> str:
        if not self.type.sharded:
            return self.type.name
        if self.key is None:
            raise ValueError("Objects and lists of a sharded model have a shard key.")
        return f"{self.type.name}-{self.key}"

    def object_name(self, pk: str) -> str:
        """Return the name of the cache entry for one row.

        :param pk: the token of the primary key (its form in names of entries).
        """
        return self._own_object if pk == self.key else fit(f"{self._stem}-{pk}")

    @cached_property
    def _own_object(self) -> str:
        # The entry name of the row whose primary key is the shard key. Computed once per scope.
        return fit(f"{self._stem}-{self.key}")

    def list_name(self, query: str, revision: str) -> str:
        """Return the name of the cache entry for the result of a query: a list of rows, or a
        number.

        :param query: a digest of the query and of the model's fields.
        :param revision: the present digest of the list's guards. It changes with each write to the
            list's rows.
        """
        stem = f"{self.type.name}-list{self._stem[len(self.type.name) :]}"
        return fit(f"{stem}-{query}-{revision}")
