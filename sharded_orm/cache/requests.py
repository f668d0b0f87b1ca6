"""Requests to the cache for one object or one list, and the state of the guards on which the result
depends.

:class:`~sharded_orm.cache.reader.Reader` sets the outcome of each request. A *guard* is the cache
entry that says whether the other entries of a scope (a set of rows) are valid. It changes with each
write to these rows (see :mod:`sharded_orm.cache.guards`). A :class:`GuardState` combines all guards
that concern a scope, as they were at one moment.
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

#: The possible outcomes of a request. BYPASS: the caller must not use the cache. MISS: the cache
#: does not have the result. HIT: the cache has it.
BYPASS, MISS, HIT = 0, 1, 2

# judge() keeps the state of guards in memory for later calls, unless the guards together have more
# than this many bytes.
_LONGEST_GUARDS = 4096


class GuardState:
    """The combined state of all guards on which the entries of a scope (a set of rows) depend.
    Immutable.

    An *open marker* in a guard says that a write is under way.

    :param raws: the bytes of the guards as they were read. The first guard is that of the widest
        set of rows, and the last guard is the scope's own.
    :param home: the position in ``raws`` of the guard that says whether objects are valid.
    """

    __slots__ = (
        "_revision",
        "covers",
        "created",
        "is_open",
        "lists_open",
        "open",
        "raws",
        "stamp",
    )

    def __init__(self, raws: tuple[bytes, ...], home: int) -> None:
        parsed: list[Guard] = list(map(guards.parse, raws))
        own = len(parsed) - 1
        #: The bytes of the guards. If they are equal at two moments, no row of the scope was
        #: written in between.
        self.raws = raws
        #: The stamp that an object must contain to be valid. It is made from the guards. If a write
        #: changes the stamp, all earlier objects are void.
        self.stamp = guards.stamp(parsed[: home + 1])
        self._revision: str | None = None
        #: When the youngest of the guards was created, in seconds since 1970.
        self.created = max([guard.created for guard in parsed])
        #: Pairs (position in ``raws``, guard) of the guards with open markers (announcements of
        #: writes).
        self.open: tuple[tuple[int, Guard], ...] = tuple(
            [(index, guard) for index, guard in enumerate(parsed) if guard.open]
        )
        #: Whether a guard of a wider set of rows announces a write. Such a write may change any
        #: object and any list of the scope.
        self.is_open = False
        #: Whether a guard announces a write that may change the lists of the scope.
        self.lists_open = False
        #: Takes the token of a primary key, and returns whether a write to this object is under
        #: way. None if the home guard (the one that says whether objects are valid) announces no
        #: write.
        self.covers: Callable[[str], bool] | None = None
        if self.open:
            self.is_open = any(guard.open for guard in parsed[:home])
            self.lists_open = self.is_open or bool(
                parsed[home].open if own == home else parsed[home].has_wide or parsed[own].open
            )
            self.covers = parsed[home].covers if parsed[home].open else None

    @property
    def revision(self) -> str:
        """The revision that is part of the names of valid lists: a digest of all guards.

        It is computed at the first use, since objects do not need it.
        """
        if self._revision is None:
            self._revision = guards.revision(map(guards.parse, self.raws))
        return self._revision


_remembered = lru_cache(maxsize=4096)(GuardState)


def judge(raws: tuple[bytes, ...], home: int) -> GuardState:
    """Return the combined state of all guards (entries that say whether others are valid) on which
    a set of rows depends.

    :param raws: the bytes of the guards. The first guard is that of the widest set of rows, and the
        last guard is the scope's own.
    :param home: the position in ``raws`` of the guard that says whether objects are valid.
    :raises BrokenGuard: one of the guards cannot be parsed.
    """
    # Do not remember the state of long guards: they are rare, and their state takes much memory.
    return (_remembered if sum(map(len, raws)) <= _LONGEST_GUARDS else GuardState)(raws, home)


class Format(Protocol):
    """How the rows of a model are stored in the cache and decoded."""

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
        """The rows that this process has decoded with this format, and keeps for later reads."""

    def values(self, rows: Sequence[Row], /) -> list[Row]:
        """Decode ``rows``, and return the results. Do not change a returned row, because several
        requests may share it.
        """


class CacheRequest:
    """A request for one object or one list. Serves a single read, in one thread.

    :param scope: the set of rows to which the result belongs. For an object, these are the rows of
        its shard key or global table, even if the model has an isolate key.
    :param format: how the rows are stored and decoded.
    :param sessions: asks a database which writers are dead. It must be the database with the rows.
        The markers (announcements of writes) of dead writers are closed. None leaves them open.
    """

    #: The names of the statistics counters for the outcomes BYPASS, MISS and HIT, in this order.
    counters: ClassVar[tuple[str, str, str]]

    outcome = BYPASS
    #: The rows after a hit, decoded by ``format``.
    rows: list[Row] | None = None
    #: The number, or the tuple of numbers, for a :class:`ListRequest` that asks for numbers. Set
    #: after a hit. After a miss, the caller sets it before the result is stored.
    value: int | tuple[int, ...] | None = None
    #: The state of the guards at the time of a miss. The result is stored so that it is valid only
    #: with this state. None if the result must not be stored.
    state: GuardState | None = None
    #: The state of the objects' guards at the time of a miss. Objects and lists may be on different
    #: servers, and each server has its own guards. None if the objects must not be stored.
    object_state: GuardState | None = None

    #: Pairs (names of objects, entries that were found) of all reads of this request. The entries
    #: contain the leases (permissions to store) that the server has given.
    looks: tuple[tuple[Sequence[str], Sequence[FoundEntry]], ...] = ()

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None) -> None:
        self.scope = scope
        self.format = format
        self.sessions = sessions
        #: Filled after a miss: maps the name of each object of the result to the entry that was
        #: found. After lease(), the entry contains the lease (the permission to store the object).
        #: None if the object must not be stored, for example because another reader stores it.
        self.fillable: dict[str, FoundEntry | None] = {}
        #: The names of the objects that were stored. Objects on a server that did not answer are
        #: among them, because the server may have stored them.
        self.stored: set[str] = set()

    def unused_leases(self) -> dict[str, FoundEntry]:
        """Return a dict that maps the name of each object with an unused lease (permission to
        store) to its entry.
        """
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
    """Where a row is whose primary key is the shard key: on its shard, and in the cache.

    :param scope: the set of rows of this shard key. Its ``place`` is the alias of the shard.
    :param token: the form of the primary key in names of cache entries.
    :param name: the name of the row's cache entry.
    """

    scope: Scope
    token: str
    name: str


class RowBatch:
    """Several rows of one shard that are read together. Their primary keys are their shard keys.

    Serves a single read, in one thread. A batch is faster than an :class:`ObjectRequest` for each
    row, because only rows that the process does not remember need a request.

    :param place: the alias of the shard.
    :param format, sessions: see :class:`CacheRequest`.
    """

    def __init__(self, place: str, format: Format, sessions: Sessions | None) -> None:
        self.place = place
        self.format = format
        self.sessions = sessions
        #: Maps each primary key, as the caller has passed it, to the address of the row.
        self.addresses: dict[Any, RowAddress] = {}
        #: The rows that were found in the cache. Maps the name of a row's entry to the decoded row.
        self.rows: dict[str, Row] = {}
        #: The rows that the cache does not have. Maps the name of a row's entry to a request.
        self.requests: dict[str, ObjectRequest] = {}

    def request(self, address: RowAddress) -> ObjectRequest:
        return ObjectRequest(address.scope, self.format, self.sessions, address.token)


class ListRequest(CacheRequest):
    """A request for the result of a query: a list of rows, one number, or several numbers.

    :param query: a digest of the query, the model's fields and the kind of result. Two requests
        with the same digest have the same result, unless the rows in the database have changed.
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
        #: True after a miss if the cache has the valid list of ids, but lacks some of the objects.
        #: Then only the objects need to be stored.
        self.is_listed = False
        #: The names of the cache entries of the rows. None until there is a hit, or the result is
        #: stored.
        self.object_names: tuple[str, ...] | None = None
