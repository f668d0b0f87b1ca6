"""``manage.py shards balance --pairs``: half of the shards become active on each side."""

from __future__ import annotations

import pytest

from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_kills import PUBLISHED


def test_the_plan_comes_first(site: PairSite) -> None:
    site.switch("photos", "--all-from", "db2")
    done = site.manage("shards", "balance", "--pairs")
    assert done.code == 0, done.err
    assert "manage.py shards switch photos 2-3 --to-side db2" in done.out
    assert "Nothing was changed. To switch the shards, add --apply." in done.out
    assert site.active() == ["db1"] * 4
    applied = site.manage("shards", "balance", "--pairs", "--apply", "--json").json
    assert [report["switched"] for report in applied["reports"]] == [{"2": "db2", "3": "db2"}]
    assert site.active() == ["db1", "db1", "db2", "db2"]
    assert [site.writable(number) for number in (1, 2)] == [["db1"], ["db2"]]
    again = site.manage("shards", "balance", "--pairs", "--apply")
    assert "There is nothing to switch.\n0 shards switched." in again.out


def test_it_goes_on_after_a_kill(site: PairSite) -> None:
    """The last switch is killed when its new side is published already, and refuses writes still."""
    site.switch("photos", "--all-from", "db2")
    site.switch("photos", "2")
    killed = site.manage("shards", "balance", "--pairs", "--apply", KILL_AT=PUBLISHED[0])
    assert killed.code == -9
    assert site.active() == ["db1", "db1", "db2", "db2"]
    assert site.writable(3) == []
    done = site.manage("shards", "balance", "--pairs", "--apply")
    assert done.code == 0, done.err
    assert "ends the switch of shard 3" in done.err
    assert site.writable(3) == ["db2"]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("--by", "rows", "--keep", "2"), "it does not go with --by, --keep"),
        (("--group", "visits"), "There is no shard group 'visits'"),
    ],
)
def test_refusals(site: PairSite, arguments: tuple[str, ...], refusal: str) -> None:
    done = site.manage("shards", "balance", "--pairs", *arguments)
    assert done.code == 1
    assert refusal in done.err
