"""Each part of the protocol is needed: without it, the same readers find stale answers.

If the harness finds nothing wrong with one of these ablations, the harness is blind.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.integration.cache.faults import troubles
from tests.integration.cache.faults.ablations import ABLATIONS
from tests.integration.cache.faults.harness import FaultHarness
from tests.integration.cache.faults.troubles import Trouble

#: The trouble that exposes each ablation.
CATCHERS: dict[str, Trouble] = {
    "bump_after_commit": troubles.dies_at("closing"),
    "no_markers": troubles.dies_at("closing"),
    "heedless": troubles.dies_at("closing"),
    "one_slot": troubles.two_writers,
    "no_lease": troubles.late_fill,
    "same_generation": troubles.dies_and_guard_is_lost,
    "counter": troubles.evict_again,
    "no_quarantine": troubles.lost_marker(troubles.evict_all_guards),
    "no_salt": troubles.plain_write,
    "repair_without_asking": troubles.slow_commit,
    "one_look": troubles.torn_list,
    "kept_for_ever": troubles.plain_write,
    "unchanged_for_ever": troubles.plain_write,
}
_ROUNDS = 30


@pytest.mark.parametrize("stores", ["memcached", pytest.param("redis", marks=pytest.mark.long)])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_it_is_caught(
    make_harness: Callable[..., FaultHarness],
    say: Callable[[str], None],
    ablation: str,
    stores: str,
) -> None:
    # Writes of others could hide the missing part.
    harness = make_harness(stores, ablation=ablation, writers=0)
    harness.warm_up()
    began, rounds = time.monotonic(), 0
    while not harness.stale and rounds < _ROUNDS:
        CATCHERS[ablation](harness)
        rounds += 1
    seconds = time.monotonic() - began
    assert harness.stale, f"{ablation} was not noticed in {rounds} rounds, {seconds:.1f} s"
    say(f"{ablation} on {stores}: caught in round {rounds}, after {seconds:.2f} s")
