"""One query on all shards of a node."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from tests.benchmarks.models import Photo, Plain
from tests.benchmarks.report import Line, at_least
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, compare

TOP = 20


def top_rows(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time the newest rows of all shards; stock queries each shard over an open connection."""
    aliases = [site.stock(f"photos_{number:05d}") for number in range(site.shards)]

    photos: Any = Photo.objects

    def ours() -> list[Any]:
        return list(photos.scatter().order_by("-posted_at")[:TOP])

    def stock() -> list[Any]:
        rows: list[Any] = []
        for alias in aliases:
            rows += Plain.objects.using(alias).order_by("-posted_at")[:TOP]
        return heapq.nlargest(TOP, rows, key=attrgetter("posted_at"))

    same = [photo.posted_at for photo in ours()] == [photo.posted_at for photo in stock()]
    if not same:
        raise AssertionError("scatter and loop differ")
    measured = compare(ours, stock, Rounds(max(3, rounds.count // 4)))
    yield at_least(
        10,
        f"scatter, newest {TOP} of {site.shards} shards: speed",
        "a loop of stock queries",
        measured,
    )
