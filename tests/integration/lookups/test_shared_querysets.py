"""Threads that read by one queryset object use their own look-ups of the same value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections

from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding import key_sources
from tests.finders.models import Account
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES, ONE, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


class TwoAnswers:
    """A source of keys whose answer for a value has changed between the look-ups of two threads."""

    def __init__(self) -> None:
        self.of_thread = threading.local()
        self.count = 0

    def keys(self, model: Any, field: Any, values: Any) -> list[int] | None:
        if field.name != "serial":
            return None
        self.count += 1
        return [getattr(self.of_thread, "key", ONE)]

    def guess(self, model: Any, field: Any, value: Any) -> None:
        return None

    def hint(self, model: Any) -> str:
        return ""


class PausedQuerySet(ShardedQuerySet[Any]):
    """Its reads wait for each other after the look-ups, before they use the keys."""

    barrier: threading.Barrier | None = None

    def _read(self, kind: Any, recording: Any, limits: Any, read_by_django: Any) -> Any:
        def read() -> Any:
            if PausedQuerySet.barrier is not None:
                PausedQuerySet.barrier.wait(PATIENCE)
            return read_by_django()

        return super()._read(kind, recording, limits, read)


def test_each_thread_uses_the_keys_that_it_has_looked_up(
    accounts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shared = TwoAnswers(), PausedQuerySet(Account)
    monkeypatch.setattr(key_sources, "_sources", [source])
    # The library records the conditions of the first read. The second one has no plan yet, so it
    # hands its look-up on to Django's code.
    assert shared.get(serial=7).id == 1
    monkeypatch.setattr(PausedQuerySet, "barrier", threading.Barrier(2))

    def read(key: int) -> int:
        source.of_thread.key = key
        try:
            account: Account = shared.get(serial=7)
            return account.id
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(read, (ONE, TWO))) == [1, 2]


READS: dict[str, Callable[[], Any]] = {
    "get": lambda: Account.objects.filter(note="").get(serial=7),
    "rows": lambda: list(Account.objects.filter(note="", serial=7)),
    "exists": lambda: Account.objects.filter(note="", serial=7).exists(),
    "count": lambda: Account.objects.filter(note="", serial=7).count(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_looks_its_value_up_once(
    name: str, accounts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TwoAnswers()
    monkeypatch.setattr(key_sources, "_sources", [source])
    counts = []
    for _ in range(4):
        source.count = 0
        READS[name]()
        counts.append(source.count)
    assert counts == [1] * 4
