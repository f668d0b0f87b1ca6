"""Changes of the cache settings on a running site, with processes of both versions at once."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from sharded_orm.cache.reader import Reader
from sharded_orm.models.cached import queryset
from tests.cached.models import CachedPhoto
from tests.queries.conftest import (
    DATABASES,
    LATER,
    ONE,
    Clock,
    cache,
    clock,
    photos,
    queries,
)

__all__ = ["clock", "photos"]

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


class Site:
    """Processes with different settings; the test acts as one after another.

    The servers are in the memory of this process, so they outlive a change of settings.
    """

    def __init__(self, settings: Any, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self._settings = settings
        self._monkeypatch = monkeypatch
        self._clock = clock
        settings.CACHES = {alias: _local() for alias in ("default", "old", "new")}

    def process(self, **changed: Any) -> None:
        """Act as a process with these settings of ``CACHE``."""
        self._settings.SHARDED_ORM = {
            **self._settings.SHARDED_ORM,
            "CACHE": {"OBJECTS": "old", **changed},
        }
        if cache().options.read:
            self._monkeypatch.setattr(queryset, "_reader", Reader(cache(), self._clock))

    def warm(self) -> None:
        """Read until the answer comes from the cache."""
        rows()
        self._clock.ahead += LATER
        for _ in range(2):
            rows()
        assert queries(rows) == 0


def _local() -> dict[str, Any]:
    return {
        "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
        "LOCATION": uuid.uuid4().hex,
    }


@pytest.fixture
def site(settings: Any, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Site:
    return Site(settings, monkeypatch, clock)


def rows() -> list[tuple[int, str]]:
    return [(row.stars, row.title) for row in CachedPhoto.objects.filter(user_id=ONE)]


def rename() -> None:
    CachedPhoto.objects.filter(user_id=ONE).update(title="renamed")


def is_fresh() -> bool:
    return {title for _, title in rows()} == {"renamed"}


@pytest.mark.parametrize("also", [True, False])
def test_list_of_servers(site: Site, photos: Any, also: bool) -> None:
    old: dict[str, Any] = {"ALSO_MARK": ["new"]} if also else {}
    new: dict[str, Any] = {"OBJECTS": "new", **({"ALSO_MARK": ["old"]} if also else {})}
    for other, writer in ((old, new), (new, old)):
        CachedPhoto.objects.uncached().filter(user_id=ONE).update(title="before")
        site.process(**other)
        site.warm()
        site.process(**writer)
        rename()
        site.process(**other)
        # Without ALSO_MARK a stale answer appears, which ALSO_MARK prevents.
        assert is_fresh() is also


def test_processes_that_do_not_read_yet_announce_their_writes(site: Site, photos: Any) -> None:
    site.process()
    site.warm()
    site.process(READ=False)
    assert queries(rows) == 1
    assert queries(rows) == 1
    rename()
    site.process()
    assert is_fresh()
