"""The template of a SELECT for one shard, and the options for compiling it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from sharded_orm.scatter.comparison import Column, OrderKey
from sharded_orm.scatter.partial_aggregates import Partial

_NUMBERS: Final = frozenset({int})
_TEXTS: Final = (str, bytes, bytearray, memoryview)
_CHARACTERS: Final = 32


@dataclass(frozen=True, eq=False)
class Template:
    """The template of a SELECT for one shard: its SQL, and a description of its columns.

    The SQL has placeholders for everything that differs between shards. All shards of a node (a
    database server) share one template, so it is immutable.
    """

    sql: str
    params: tuple[Any, ...]
    compiler: Any
    # The number of columns that the queryset itself selects. The columns after them are selected
    # only for the merge.
    width: int
    columns: tuple[Column, ...]
    order: tuple[OrderKey, ...] = ()
    # The positions of the columns by which the merge compares rows of different shards:
    # ``distinct`` for DISTINCT, ``groups`` for GROUP BY. Empty if the query lacks the clause, or if
    # rows need not be compared for it, for example because equal rows are always on one shard.
    distinct: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    partials: tuple[Partial, ...] = ()
    # Whether values depend on the precision to which the server divides numbers.
    divides: bool = False
    # Whether the rows of one group of GROUP BY may be on several shards, so that the partial
    # results of the group must be merged.
    merges_groups: bool = False
    pk: int | None = None
    tables: frozenset[str] = frozenset()

    @cached_property
    def parameter_count(self) -> int:
        """The number of :attr:`params`, in which a long text counts as several."""
        return count_of(self.params)

    @property
    def compared(self) -> tuple[int, ...]:
        """The positions, ascending, of all columns by which the merge compares rows."""
        columns = {key.column for key in self.order}
        columns.update(self.distinct, self.groups)
        for partial in self.partials:
            columns.update(partial.compared)
        return tuple(sorted(columns))

    @property
    def summed(self) -> tuple[int, ...]:
        """The positions, ascending, of the columns in which the merge adds the shards' values."""
        return tuple(sorted({column for partial in self.partials for column in partial.summed}))


def count_of(params: Sequence[Any]) -> int:
    """Return the number of ``params``. A text counts as one for each 32 characters."""
    count = len(params)
    if count and not _NUMBERS.issuperset(map(type, params)):
        count += sum([len(p) // _CHARACTERS for p in params if isinstance(p, _TEXTS)])
    return count


@dataclass
class CompileOptions:
    """Options for compiling the SQL of a branch (the SELECT for one shard)."""

    # The number of rows to read from each shard: the query's OFFSET + LIMIT, because all of them
    # may be on one shard. None means all rows.
    limit: int | None = None
    # A field by whose values the caller chooses the rows to read, such as the primary key. Then the
    # SQL ends with the condition ``field IN (…)`` and has no ORDER BY, and the values are its last
    # parameters. None if the rows are not chosen in this way.
    by_key: Any = None
    # Whether to select the primary key as an extra column.
    with_pk: bool = False
    # The columns of the shard key. If GROUP BY contains all of them, all rows of each group are on
    # one shard.
    local_columns: frozenset[str] = field(default_factory=frozenset)
    # Whether the query only checks if any row exists. Then the groups of GROUP BY need no merge.
    existence: bool = False
    # Whether the query selects one row of aggregates, as aggregate() does.
    summary: bool = False
    # A flag of Django's compilers. If true, a query that certainly has no rows is not sent. If
    # false, it is sent, because only the database can compute an aggregate of no rows.
    elide_empty: bool = True
    # Whether to select the number of rows instead of the rows.
    counted: bool = False
    # Whether the caller computes an average or a sum that depends on the precision to which the
    # server divides numbers.
    divides: bool = False
