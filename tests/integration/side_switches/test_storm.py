"""Switches to and fro, half of them killed at a random step, while writers go on writing."""

from __future__ import annotations

import random

import pytest

from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_kills import MOMENTS
from tests.integration.side_switches.test_switch import check_errors

SWITCHES = 100


@pytest.mark.long
def test_no_write_is_lost_whatever_is_killed(site: PairSite) -> None:
    chosen = random.Random(58)
    # Longer than it takes until the next command ends a killed switch.
    site.setting["MOVE_WAIT"] = 120
    site.save()
    with site.writers(4) as writers, site.watched() as writable:
        for number in range(SWITCHES):
            side = "db1" if number % 2 else "db2"
            if chosen.random() < 0.5:
                site.switch_and_die(chosen.choice(MOMENTS), "photos", "0-3", "--to-side", side)
            site.switch("photos", "0-3", "--to-side", side)
            assert site.active() == [side] * 4
    rows = site.all_rows()
    acknowledged: list[int] = []
    for number in writers.numbers:
        acknowledged += [row for _, row in writers.acknowledged(number)]
        check_errors(writers, number)
    assert len(acknowledged) == len(set(acknowledged))
    assert set(acknowledged) == rows
    assert "both" not in writable
