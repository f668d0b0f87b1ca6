"""What is asked of the cache, and what the guards say about it.

A *want* is one object or one list. It goes through :class:`~sharded_orm.cache.reader.Reader`,
which leaves with it what came of it. A :class:`GuardState` is what all guards of its scope say
together, at one moment.
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

#: What came of a want.
BYPASS, MISS, HIT = 0, 1, 2

# Longer guards (bytes) are not remembered.
_LONGEST_GUARDS = 4096


class GuardState:
    """What the guards of a scope say together. Immutable."""

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
        read: list[Guard] = list(map(guards.parse, raws))
        own = len(read) - 1
        #: As they stand on the server: equal bytes are one state.
        self.raws = raws
        #: What objects must carry.
        self.stamp = guards.stamp(read[: home + 1])
        #: What stands in the names of lists.
        self.revision = guards.revision(read)
        self.created = max(guard.created for guard in read)
        #: A write is under way that may concern anything in the scope.
        self.is_open = any(guard.open for guard in read[:home])
        #: Or lists in it.
        self.lists_open = self.is_open or bool(
            read[home].open if own == home else read[home].has_wide or read[own].open
        )
        #: Tells whether a write is under way that concerns an object; None: there is none.
        self.covers: Callable[[str], bool] | None = read[home].covers if read[home].open else None
        #: Guards with open markers, and which of the scope's guards they are.
        self.open: tuple[tuple[int, Guard], ...] = tuple(
            (index, guard) for index, guard in enumerate(read) if guard.open
        )


_remembered = lru_cache(maxsize=4096)(GuardState)


def judge(raws: tuple[bytes, ...], home: int) -> GuardState:
    """What guards say, as they stand on the server. :exc:`BrokenGuard` if one is none."""
    # Longer ones are rare, and would fill the memory.
    return (_remembered if sum(map(len, raws)) <= _LONGEST_GUARDS else GuardState)(raws, home)


class Format(Protocol):
    """What the rows of a model look like, and what is made of them."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; rows that carry another one do not count."""

    @property
    def width(self) -> int:
        """The number of fields."""

    @property
    def decoded(self) -> Decoded | None:
        """Rows whose :meth:`values` are known; None: rows are left as they were stored."""

    def values(self, rows: Sequence[Row], /) -> list[Row]:
        """The rows in the form that is wanted. Equal rows have equal values, which nobody
        changes."""


class CacheRequest:
    """What is asked for. One read each; not shared between threads.

    :param scope: of the object (without isolate key) or list.
    :param sessions: those of the database that holds the rows; None: nothing is repaired.
    """

    __slots__ = (
        "format",
        "found",
        "outcome",
        "rows",
        "scope",
        "sessions",
        "stamped",
        "state",
        "value",
    )

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None) -> None:
        self.scope = scope
        self.format = format
        self.sessions = sessions
        self.outcome = BYPASS
        #: The rows of a hit; their values, if the format has ``decoded``.
        self.rows: list[Row] | None = None
        #: The number of a hit, for scalars.
        self.value: int | None = None
        #: The guards under which what is missing may be filled; None: it may not.
        self.state: GuardState | None = None
        #: The same for its objects, which may be on another server.
        self.stamped: GuardState | None = None
        # By name: what stood there and may be replaced under the lease; None: it was valid.
        self.found: dict[str, FoundEntry | None] = {}


class ObjectRequest(CacheRequest):
    """A row by its primary key.

    :param pk: its token.
    """

    __slots__ = ("name", "pk")

    def __init__(self, scope: Scope, format: Format, sessions: Sessions | None, pk: str) -> None:
        super().__init__(scope, format, sessions)
        self.pk = pk
        self.name = scope.object_name(pk)


class ListRequest(CacheRequest):
    """The rows of a query, or with ``scalar`` the number that it results in.

    :param query: a digest of everything that the result depends on but the rows.
    """

    __slots__ = ("is_listed", "names", "query", "scalar")

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
        #: Its ids were there, but not all the rows.
        self.is_listed = False
        #: The names of the rows' objects, after a hit or a fill.
        self.names: tuple[str, ...] | None = None
