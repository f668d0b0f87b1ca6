"""No read is ever stale, whatever happens to writers, caches and connections.

The long form reads at least 200,000 times in each mode, and prints the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.cache.faults.harness import FaultHarness
from tests.integration.cache.faults.troubles import MODES

#: The least share of reads that the cache must answer; with less, the test would prove nothing.
FLOORS = {"normal": 0.1}
_FLOOR = 0.01
#: Options with which servers lose entries without our help.
_FORGETFUL = {"small": True, "TTL": 2.0}
_LONG = 200_000
#: The short form leaves out combinations that prove little more.
_SHORT = {
    "memcached": set(MODES),
    "redis": {"restarts"},
    "both": {"normal"},
}


def _runs() -> Iterator[Any]:
    for stores, short in _SHORT.items():
        for mode in MODES:
            if mode in short:
                yield pytest.param(mode, stores, 1_000)
            yield pytest.param(mode, stores, _LONG, marks=pytest.mark.long)


@pytest.mark.parametrize(("mode", "stores", "minimum"), list(_runs()))
def test_nothing_stale(
    make_harness: Callable[..., FaultHarness],
    say: Callable[[str], None],
    mode: str,
    stores: str,
    minimum: int,
) -> None:
    harness = make_harness(
        stores,
        # Readers are late on purpose, so they spend much of their time waiting.
        readers=2 if minimum < _LONG else 6,
        self_kill=150 if mode == "kills" else 0,
        **(_FORGETFUL if mode == "evictions" else {}),
    )
    harness.warm_up()
    enough = False
    while not enough:
        for trouble in MODES[mode]:
            trouble(harness)
            harness.troubles[trouble.__name__] += 1
            assert harness.stale == [], trouble.__name__
        enough = harness.workload.reads >= minimum
    harness.settle()
    harness.workload.stop_readers()
    report = harness.report()
    say(f"{mode} on {stores}: " + ", ".join(f"{name} {value}" for name, value in report.items()))
    assert harness.stale == []
    assert harness.hit_ratio >= FLOORS.get(mode, _FLOOR)
    assert report["l1 hits"] == report["broken"] == 0
    assert report["commits"] > 0
    if mode == "evictions":
        assert all(cache.evictions for cache in harness.caches)
