"""Requests to the cache for one object or one list, and the state of the guards behind them.

:class:`~sharded_orm.cache.reader.Reader` leaves the outcome with each request. A *guard* is an
entry that changes with each write in its part of the data (see :mod:`sharded_orm.cache.guards`);
a :class:`GuardState` combines all guards of a scope at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from sharded_orm.cache import guards
from sharded_orm.cache.guards import Guard
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.process_cache import Decoded
from sharded_orm.cache.repair import Sessions
from sharded_orm.cache.stores.base import FoundEntry
from sharded_orm.cache.values import Row

#: Outcomes of a request.
BYPASS, MISS, HIT = 0, 1, 2

# Longer guards (bytes) are not remembered.
_LONGEST_GUARDS = 4096


class GuardState:
    """The guards of a scope, combined. Immutable.

    :param raws: the guards as they stand on the server, the widest first.
    :param home: the position of the guard of the objects.
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
        #: Equal bytes are one state.
        self.raws = raws
        #: The stamp that valid objects carry.
        self.stamp = guards.stamp(parsed[: home + 1])
        #: The revision in the names of valid lists.
        self.revision = guards.revision(parsed)
        self.created = max(guard.created for guard in parsed)
        #: Whether a write is under way that may concern anything in the scope.
        self.is_open = any(guard.open for guard in parsed[:home])
        #: Whether a write is under way that may concern lists in it.
        self.lists_open = self.is_open or bool(
            parsed[home].open if own == home else parsed[home].has_wide or parsed[own].open
        )
        #: Whether a write to the object with this token is under way; None: no write is.
        self.covers: Callable[[str], bool] | None = (
            parsed[home].covers if parsed[home].open else None
        )
        #: Guards with open markers, with their positions in the scope.
        self.open: tuple[tuple[int, Guard], ...] = tuple(
            (index, guard) for index, guard in enumerate(parsed) if guard.open
        )


_remembered = lru_cache(maxsize=4096)(GuardState)


def judge(raws: tuple[bytes, ...], home: int) -> GuardState:
    """The state of guards, given as they stand on the server.

    :raises BrokenGuard: one of them cannot be parsed.
    """
    # Longer ones are rare, and would fill the memory.
    return (_remembered if sum(map(len, raws)) <= _LONGEST_GUARDS else GuardState)(raws, home)


class Format(Protocol):
    """How the rows of a model are stored and decoded."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; rows that carry another one do not count."""

    @property
    def width(self) -> int:
        """The number of fields."""

    @property
    def decoded(self) -> Decoded | None:
        """The cache of decoded rows; None: rows stay as they were stored."""

    def values(self, rows: Sequence[Row], /) -> list[Row]:
        """The decoded rows. They are shared, so callers must not change their values."""


class CacheRequest:
    """A request for one object or list, for one read. Not shared between threads.

    :param scope: of the object (without isolate key) or list.
    :param sessions: the sessions of the database that holds the rows, to find dead writers;
        None: nothing is repaired.
    """

    __slots__ = (
        "fillable",
        "format",
        "object_state",
        "outcome",
        "rows",
        "scope",
        "sessions",
        "state",
        "value",
    )

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None) -> None:
        self.scope = scope
        self.format = format
        self.sessions = sessions
        self.outcome = BYPASS
        #: The rows of a hit; decoded, if the format has ``decoded``.
        self.rows: list[Row] | None = None
        #: The number of a hit, for scalars.
        self.value: int | None = None
        #: The guards under which a miss may be filled; None: it must not be.
        self.state: GuardState | None = None
        #: The same for its objects, which may be on another server.
        self.object_state: GuardState | None = None
        #: By name: the object that may be replaced under its lease; None: it is valid, or
        #: another reader fills it.
        self.fillable: dict[str, FoundEntry | None] = {}


class ObjectRequest(CacheRequest):
    """A request for a row by its primary key.

    :param pk: the token of the key.
    """

    __slots__ = ("name", "pk")

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None, pk: str) -> None:
        super().__init__(scope, format, sessions)
        self.pk = pk
        self.name = scope.object_name(pk)


class ListRequest(CacheRequest):
    """A request for the rows of a query, or with ``scalar`` for the number that is its result.

    :param query: a digest of everything but the rows that the result depends on.
    """

    __slots__ = ("is_listed", "object_names", "query", "scalar")

    def __init__(
        self,
        scope: Scope,
        format: Format,
        sessions: Sessions | None,
        query: str,
        *,
        scalar: bool = False,
    ) -> None:
        super().__init__(scope, format, sessions)
        self.query = query
        self.scalar = scalar
        #: Whether the cache has the ids, though not all rows.
        self.is_listed = False
        #: The names of the rows' objects, after a hit or a fill.
        self.object_names: tuple[str, ...] | None = None
