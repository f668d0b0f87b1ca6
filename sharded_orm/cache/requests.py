"""Requests to the cache for one object or one list, and the state of the guards of a scope.

:class:`~sharded_orm.cache.reader.Reader` sets the outcome of each request. A *guard* is the cache
entry that says whether the other entries of a scope (a set of rows) are valid; it changes with
each write to these rows (see :mod:`sharded_orm.cache.guards`). A :class:`GuardState` combines all
guards that concern a scope, as they were at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

from sharded_orm.cache import guards
from sharded_orm.cache.guards import Guard
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.process_cache import Decoded
from sharded_orm.cache.repair import Sessions
from sharded_orm.cache.stores.base import FoundEntry
from sharded_orm.cache.values import Row

#: The possible outcomes of a request: the caller must bypass the cache (BYPASS), the cache lacks
#: the result (MISS), or it has the result (HIT).
BYPASS, MISS, HIT = 0, 1, 2

# judge() keeps the combined state of guards for the next call, if the guards have at most this many
# bytes together.
_LONGEST_GUARDS = 4096


class GuardState:
    """The combined state of all guards that concern a scope (a set of rows). Immutable.

    An *open marker* in a guard says that a write is under way.

    :param raws: the bytes of the guards, as they were read. The guard of the widest scope is first,
        the scope's own guard is last.
    :param home: the position of the guard that says whether objects are valid.
    """

    __slots__ = (
        "covers",
        "created",
        "is_open",
        "lists_open",
        "open",
        "raws",
        "revision",
        "stamp",
    )

    def __init__(self, raws: tuple[bytes, ...], home: int) -> None:
        parsed: list[Guard] = list(map(guards.parse, raws))
        own = len(parsed) - 1
        #: The bytes of the guards. If the guards are equal at two moments, no row of their scope
        #: (set of rows) was written in between.
        self.raws = raws
        #: A valid object must carry this stamp. It is made from the guards. When the stamp changes,
        #: all objects become void.
        self.stamp = guards.stamp(parsed[: home + 1])
        #: The revision that the name of a valid list must contain: a digest of all guards.
        self.revision = guards.revision(parsed)
        #: The time at which the youngest of the guards was created, in seconds since 1970.
        self.created = max(guard.created for guard in parsed)
        #: Whether a write is under way that may concern any cached object and any cached list of
        #: the scope (the set of rows).
        self.is_open = any(guard.open for guard in parsed[:home])
        #: Whether a write is under way that may concern cached lists of the scope (the set of
        #: rows).
        self.lists_open = self.is_open or bool(
            parsed[home].open if own == home else parsed[home].has_wide or parsed[own].open
        )
        #: A function that takes the token of a primary key, and returns whether that object is
        #: being written. None if the home guard (the one that says whether objects are valid) has
        #: no open marker.
        self.covers: Callable[[str], bool] | None = (
            parsed[home].covers if parsed[home].open else None
        )
        #: The guards with open markers (announcements of writes), with their positions in ``raws``.
        self.open: tuple[tuple[int, Guard], ...] = tuple(
            (index, guard) for index, guard in enumerate(parsed) if guard.open
        )


_remembered = lru_cache(maxsize=4096)(GuardState)


def judge(raws: tuple[bytes, ...], home: int) -> GuardState:
    """Return the combined state of all guards (entries that say whether others are valid) that
    concern a set of rows.

    :param raws: the bytes of the guards, that of the widest scope first, the scope's own guard
        last.
    :param home: the position of the guard that says whether objects are valid.

    :raises BrokenGuard: one of the guards cannot be parsed.
    """
    # Do not keep the state of long guards for later calls: long guards are rare, and their state
    # takes much memory.
    return (_remembered if sum(map(len, raws)) <= _LONGEST_GUARDS else GuardState)(raws, home)


class Format(Protocol):
    """The format in which the rows of a model are stored in the cache, and how to decode them."""

    @property
    def fingerprint(self) -> str:
        """A hexadecimal digest of the model's fields.

        Cached rows that carry a different digest are unusable.
        """

    @property
    def width(self) -> int:
        """The number of values in a row: one for each concrete field of the model."""

    @property
    def decoded(self) -> Decoded:
        """The decoded rows of this format that the process remembers."""

    def values(self, rows: Sequence[Row], /) -> list[Row]:
        """Return ``rows`` decoded. Do not change the result: several requests may share it."""


class CacheRequest:
    """A request for one object or one list. Each request serves a single read, in one thread.

    :param scope: the scope (set of rows) of the list; for an object, that of its shard key or
        global table, never that of an isolate key.
    :param format: how the rows are stored and decoded.
    :param sessions: finds out, in the database that holds the rows, which writers are dead. None
        leaves the markers of dead writers (announcements of their writes) open.
    """

    #: The names of the counters for the outcomes BYPASS, MISS and HIT of this class of requests.
    counters: ClassVar[tuple[str, str, str]]

    outcome = BYPASS
    #: The rows after a hit, decoded by ``format``.
    rows: list[Row] | None = None
    #: The result of a :class:`ListRequest` that asks for a number or several numbers. Set after a
    #: hit, or before the result is stored.
    value: int | tuple[int, ...] | None = None
    #: After a miss, the state of the guards at that time: the result is stored as valid for this
    #: state only. None if the result must not be stored.
    state: GuardState | None = None
    #: After a miss, the state of the guards of the objects, which may be on a different server than
    #: those of the list. None if the objects must not be stored.
    object_state: GuardState | None = None

    #: The objects that were looked for: their names, and the entries as they were found, with the
    #: leases (permissions to store) that the server has given.
    looks: tuple[tuple[Sequence[str], Sequence[FoundEntry]], ...] = ()

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None) -> None:
        self.scope = scope
        self.format = format
        self.sessions = sessions
        #: After a miss, the entries of the result's objects as they were found, keyed by object
        #: name. After lease(), an entry has the lease (the permission to store the object). The
        #: value is None if the object must not be stored, for example because another reader stores
        #: it.
        self.fillable: dict[str, FoundEntry | None] = {}
        #: The names of the objects that were stored, or that a server without an answer may have stored.
        self.stored: set[str] = set()

    def unused_leases(self) -> dict[str, FoundEntry]:
        """Return the entries whose leases (permissions to store) were not used yet, by their names."""
        return {
            name: entry
            for names, entries in self.looks
            for name, entry in zip(names, entries, strict=True)
            if entry.lease is not None and name not in self.stored
        }


class ObjectRequest(CacheRequest):
    """A request for one row by its primary key.

    :param pk: the token of the primary key (its form in names of entries).
    """

    counters = ("bypasses", "object_misses", "object_hits")

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None, pk: str) -> None:
        super().__init__(scope, format, sessions)
        self.pk = pk
        self.name = scope.object_name(pk)


class RowAddress(NamedTuple):
    """The place of a row whose primary key is the shard key: its shard, and its entry in the cache.

    :param scope: the rows of this shard key, as the cache names them. Its place is the alias of the
        shard.
    :param token: the primary key in names of cache entries.
    :param name: the name of the row's cache entry.
    """

    scope: Scope
    token: str
    name: str


class RowBatch:
    """Rows of one shard that are read by their primary keys, which are the shard keys.

    It serves a single read, in one thread. A row that the process remembers needs no
    :class:`ObjectRequest`.

    :param place: the alias of the shard.
    :param format, sessions: see :class:`CacheRequest`.
    """

    def __init__(self, place: str, format: Format, sessions: Sessions | None) -> None:
        self.place = place
        self.format = format
        self.sessions = sessions
        #: The addresses of the rows, by primary key as the caller passed it.
        self.addresses: dict[Any, RowAddress] = {}
        #: The rows that were found, decoded by ``format``, by the names of their entries.
        self.rows: dict[str, Row] = {}
        #: The requests for rows that were not found, by the names of the entries.
        self.requests: dict[str, ObjectRequest] = {}

    def request(self, address: RowAddress) -> ObjectRequest:
        """Return a new request for one row of the batch."""
        return ObjectRequest(address.scope, self.format, self.sessions, address.token)


class ListRequest(CacheRequest):
    """A request for the result of a query: a list of rows, or one number.

    :param query: a digest of the query, the model's fields and the kind of result. Requests with
        the same digest have different results only if the rows in the database changed.
    :param scalar: whether the result is one number, as for ``count()`` and ``exists()``. Default:
        the result is a list of rows.
    :param numbers: whether the result is a tuple of numbers (default: no).
    """

    counters = ("bypasses", "list_misses", "list_hits")

    def __init__(
        self,
        scope: Scope,
        format: Format,
        sessions: Sessions | None,
        query: str,
        *,
        scalar: bool = False,
        numbers: bool = False,
    ) -> None:
        super().__init__(scope, format, sessions)
        self.query = query
        self.scalar = scalar
        self.numbers = numbers
        #: True after a miss if a valid list of ids is known, and only some of the objects are missing.
        self.is_listed = False
        #: The names of the rows' objects in the cache; None until there is a hit or the result is
        #: stored.
        self.object_names: tuple[str, ...] | None = None
