"""Pages of a list of rows from many shards. No query counts the rows, and only the rows of one page
are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.core.paginator import EmptyPage, Page, PageNotAnInteger, Paginator
from django.db import DatabaseError
from django.utils.functional import cached_property

from sharded_orm.admin.failures import Failed, by_node
from sharded_orm.models.querysets.route import Route
from sharded_orm.scatter.failures import is_failure

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
    _Page = Page[Any]
else:
    _Paginator, _Page = Paginator, Page

#: No page begins after the row with this number. Pages far from the first are expensive, because
#: every shard has to read and drop all rows before the page.
LAST_ROW = 10_000


@dataclass(frozen=True)
class PageOfRows:
    """One page: its rows, whether there are more rows, and the shards that failed.

    ``seconds`` is the time that the query took. ``errors`` holds the error of each failed shard,
    keyed by the shard's alias.
    """

    rows: list[Any]
    more: bool
    route: Route
    seconds: float
    errors: Mapping[str, BaseException] = field(default_factory=dict)

    @cached_property
    def failed(self) -> list[Failed]:
        return by_node(self.errors)

    @property
    def silent(self) -> bool:
        """Whether the query failed on all shards."""
        return len(self.errors) == self.shards > 0

    @property
    def shards(self) -> int:
        return len(self.route.shards)

    @property
    def nodes(self) -> int:
        return len(self.route.nodes)

    @property
    def milliseconds(self) -> int:
        return round(self.seconds * 1000)


def first_row(number: int, size: int) -> int:
    """Return the index, counted from 0, of the first row of page ``number``."""
    return (number - 1) * size


def is_too_far(number: int, size: int) -> bool:
    """Whether page ``number`` begins after row :data:`LAST_ROW`."""
    return first_row(number, size) >= LAST_ROW


def last_page(size: int) -> int:
    """Return the number of the last page that may be shown, with ``size`` rows on each page."""
    return max(1, -(-LAST_ROW // size))


class Pages(_Paginator):
    """A paginator over all shards. It does not count rows, and no page begins after row
    :data:`LAST_ROW`.

    Each page knows whether a next page exists. The total number of pages is not known.
    """

    def page(self, number: Any) -> Any:
        """Read page ``number``, with one query per node. The page is empty if there are too few rows.

        :raises InvalidPage: ``number`` is not a positive integer, or the page begins after row
            :data:`LAST_ROW`.
        """
        try:
            page_number = int(number)
        except (TypeError, ValueError) as exc:
            raise PageNotAnInteger(f"{number!r} is not the number of a page.") from exc
        if page_number < 1 or is_too_far(page_number, self.per_page):
            raise EmptyPage(f"There is no page {number!r}, or it is behind row {LAST_ROW}.")
        low = first_row(page_number, self.per_page)
        return _PageOfMany(list(self.object_list[low : low + self.per_page + 1]), page_number, self)


class _PageOfMany(_Page):
    def __init__(self, rows: list[Any], number: int, paginator: Pages) -> None:
        super().__init__(rows[: paginator.per_page], number, paginator)
        self._more = len(rows) > paginator.per_page

    def has_next(self) -> bool:
        return self._more


def read(queryset: Any, number: int, size: int) -> PageOfRows:
    """Read page ``number`` of ``queryset``, and one more row to know whether there is a next page.

    Costs one query per node; see :meth:`ShardedQuerySet.scatter`. If the conditions of ``queryset``
    allow only one shard, only that shard is queried. If shards fail, their errors are returned in
    the result.

    :raises ScatterError: the query failed on all shards, so the query itself may be wrong.
    """
    low = first_row(number, size)
    route = queryset.explain_routing()
    page = queryset[low : low + size + 1]
    began = time.perf_counter()
    errors: Mapping[str, BaseException]
    try:
        rows = list(page)
        errors = page.failed_shards
    except DatabaseError as error:
        if not is_failure(error) or len(route.shards) != 1:
            raise
        rows, errors = [], {route.aliases[0]: error}
    seconds = time.perf_counter() - began
    return PageOfRows(rows[:size], len(rows) > size, route, seconds, errors)
