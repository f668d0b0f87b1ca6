"""Shards change their active side while writers go on writing."""

from __future__ import annotations

import pytest

from tests.integration.side_switches.site import PairSite


def test_to_and_fro(site: PairSite) -> None:
    site.write_a_row(1)
    report = site.switch("photos", "0", "--to-side", "db2", "--json").json
    assert report["switched"] == {"0": "db2"}
    assert site.active() == ["db2", "db1", "db2", "db2"]
    assert site.writable() == ["db2"]
    site.write_a_row(2, "second")
    assert site.switch("photos", "0", "--json").json["switched"] == {"0": "db1"}
    assert site.active() == ["db1", "db1", "db2", "db2"]
    assert site.writable() == ["db1"]
    assert site.all_rows() == {1, 2}
    # Neighbouring ranges that are alike are one range again.
    assert site.document()["groups"]["photos"] == {**site.groups["photos"]}


def test_all_shards_of_a_side(site: PairSite) -> None:
    report = site.switch("photos", "--all-from", "db1", "--json").json
    assert report["switched"] == {"0": "db2", "1": "db2"}
    assert site.active() == ["db2"] * 4
    again = site.switch("photos", "0-3", "--to-side", "db2", "--json").json
    assert (again["switched"], again["already"]) == ({}, [0, 1, 2, 3])


@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.long)])
def test_no_acknowledged_write_is_lost_or_doubled(site: PairSite, rounds: int) -> None:
    pauses: list[float] = []
    with site.writers(4) as writers, site.watched() as writable:
        for _ in range(rounds):
            pauses += site.switch("photos", "0-3", "--json").json["pauses"]
            for number in writers.numbers:
                writers.wait_for_more(number)
    rows = site.all_rows()
    acknowledged: set[int] = set()
    for number in writers.numbers:
        own = [row for _, row in writers.acknowledged(number)]
        assert len(own) == len(set(own))
        acknowledged.update(own)
        # Only transactions of several statements are refused. In autocommit, a write waits.
        assert {text.split()[0] for *_, text in writers.errors(number)} <= {"SideFenced"}
    assert acknowledged == rows
    assert {"first", "second"} <= set(writable)
    assert "both" not in writable
    print(f"pauses {sorted(pauses)[-3:]}; longest silence {writers.longest_silence():.3f} s")
