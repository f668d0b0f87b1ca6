"""Raw SQL on the shard of a shard key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.db.models.query import RawQuerySet

from sharded_orm.models.moves.confirmation import confirmed, confirmed_stream

if TYPE_CHECKING:
    from sharded_orm.models.querysets.base import RoutedQuerySet


class RawKeyQuerySet(RawQuerySet):  # type: ignore[type-arg]  # the class is not generic at run time
    """Raw SQL that runs on the shard of a key. The shard is looked up when the rows are read.

    If the key moves to another shard during the read, the rows are read once more. But in a
    transaction, nothing is read again, and :exc:`KeyMoved` is raised.
    """

    #: The queryset whose conditions contain the shard key.
    of_key: RoutedQuerySet[Any]
    _result_cache: list[Any] | None

    def _clone(self) -> RawKeyQuerySet:
        clone: RawKeyQuerySet = super()._clone()  # type: ignore[misc]  # missing in Django's type stubs
        clone.of_key = self.of_key
        return clone

    def _fetch_all(self) -> None:
        if self._result_cache is None:
            self._result_cache = confirmed(self._group, lambda: list(self._rows()))
        super()._fetch_all()  # type: ignore[misc]  # missing in Django's type stubs

    def iterator(self) -> Iterator[Any]:
        return confirmed_stream(self._group, self._rows, several=lambda: False)

    @property
    def _group(self) -> str:
        return self.of_key._options.group

    def _rows(self) -> Iterator[Any]:
        return self.using(self.of_key._route().aliases[0]).iterator()
