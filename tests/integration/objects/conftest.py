"""What tests of objects share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections, transaction

from sharded_orm import runtime
from sharded_orm.cache.reader import Reader
from sharded_orm.models.cached import queryset
from sharded_orm.testing import cache_isolation

#: The aliases that these tests use.
DATABASES = ["default", "directory", "pins"]


class LaterClock:
    """Seconds since 1970, some ahead, so that the quarantine of guards is over."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> LaterClock:
    """The clock of the readers of an empty cache."""
    cache_isolation.renew()
    clock = LaterClock()
    client = runtime.cache()
    assert client is not None
    monkeypatch.setattr(queryset, "_reader", Reader(client, clock))
    return clock


def on(cls: Any, number: int, **values: Any) -> Any:
    """Create an object on a given shard."""
    return cls.objects.using(f"pins_{number:05d}").create(**values)


@contextmanager
def refused(error: type[Exception], match: str | None = None) -> Iterator[None]:
    """Expect an error of a write, after which the transaction of the test can go on."""
    with pytest.raises(error, match=match), transaction.atomic(using="pins"):
        yield


def set_body(row: Any, body: str) -> None:
    """Replace the stored body by any text that the column takes, past the library."""
    with connections[row._state.db].cursor() as cursor:
        cursor.execute(f"UPDATE {row._meta.db_table} SET data = %s WHERE id = %s", [body, row.pk])
