"""The operator's process killed with SIGKILL at each step: one command ends what it has left."""

from __future__ import annotations

import pytest

from tests.integration.side_switches.site import PairSite
from tests.integration.stopped_process import go_on, wait_until_stopped

_RECORD = "after:sharded_orm.operations.pairs.record.SwitchRecord"
_FENCE = "after:sharded_orm.backends.mysql.side_fence.MySQLSideFence"
_SWITCH = "after:sharded_orm.operations.pairs.side_switch.SideSwitch"
#: The end of the switch of a shard.
ENDED = f"{_RECORD}.end:1"
#: The process dies at the end of that call of the method.
OPEN = [f"{_RECORD}.enter:1", f"{_FENCE}.prepare:1", f"{_RECORD}.enter:2"]
CLOSED = [f"{_FENCE}.close:1", f"{_SWITCH}._wait_for_new:2", f"{_RECORD}.enter:3"]
PUBLISHED = [
    f"{_RECORD}.publish:1",
    f"{_FENCE}.open:1",
    f"{_RECORD}.enter:4",
    f"{_FENCE}.remove:1",
    ENDED,
]
MOMENTS = OPEN + CLOSED + PUBLISHED


def marked(moments: list[str], routine: tuple[str, ...]) -> list[object]:
    return [
        moment if moment in routine else pytest.param(moment, marks=pytest.mark.long)
        for moment in moments
    ]


@pytest.mark.parametrize(
    "moment", marked(MOMENTS, (OPEN[1], CLOSED[0], PUBLISHED[0], PUBLISHED[1]))
)
def test_repair_ends_what_was_left(site: PairSite, moment: str) -> None:
    site.write_a_row(1)
    site.switch_and_die(moment, "photos", "0")
    assert len(site.writable()) <= 1
    report = site.switch("photos", "--repair", "--json").json
    assert report["failures"] == {}
    active = "db2" if moment in PUBLISHED else "db1"
    assert (site.active()[0], site.writable()) == (active, [active])
    assert site.all_rows() == {1}


@pytest.mark.parametrize("moment", marked(MOMENTS, (CLOSED[2], PUBLISHED[0])))
def test_the_same_command_goes_on(site: PairSite, moment: str) -> None:
    site.write_a_row(1)
    site.switch_and_die(moment, "photos", "0,2", "--to-side", "db2")
    assert len(site.writable()) <= 1
    site.switch("photos", "0,2", "--to-side", "db2")
    assert site.active() == ["db2", "db1", "db2", "db2"]
    assert site.writable() == ["db2"]
    assert site.all_rows() == {1}
    # Everything works as before.
    site.switch("photos", "0", "--to-side", "db1")
    assert site.writable() == ["db1"]


def test_a_process_that_was_silent_for_too_long_opens_nothing(site: PairSite) -> None:
    """The first process is stopped before it undoes its switch; the second has switched meanwhile."""
    fence = "before:sharded_orm.backends.mysql.side_fence.MySQLSideFence.remove:1"
    site.switch_and_die(CLOSED[1], "photos", "0")
    first = site.start("shards", "switch", "photos", "--repair", STOP_AT=fence)
    wait_until_stopped(first)
    site.let_lease_expire()
    assert site.switch("photos", "0", "--to-side", "db2", "--json").json["switched"] == {"0": "db2"}
    _out, err = go_on(first)
    assert first.returncode == 1
    assert "taken over by another process" in err
    assert site.writable() == ["db2"]


def test_a_topology_that_was_changed_meanwhile(site: PairSite) -> None:
    site.switch_and_die(CLOSED[0], "photos", "0")
    groups = site.document()["groups"]
    groups["photos"]["RANGES"] = [{"range": [0, 3], "primary": "db1", "replica": "db2"}]
    site.publish(groups)
    assert site.switch("photos", "--repair", "--json").json["ok"]
    assert site.writable() == ["db1"]


def test_a_topology_that_was_changed_back_after_the_new_side_was_opened(site: PairSite) -> None:
    site.switch_and_die(PUBLISHED[1], "photos", "0")
    site.publish(site.groups)
    assert "change it back" in site.switch("photos", "--repair", code=1).err
    assert site.writable() == ["db2"]


def test_repair_opens_the_active_side_if_the_journal_was_lost(site: PairSite) -> None:
    site.switch_and_die(CLOSED[0], "photos", "0")
    site.run(
        "from sharded_orm.models import OperationRun; OperationRun.objects.all().delete();"
        " answer = None"
    )
    problems = site.manage("shards", "status", "--json").json["problems"]
    assert any("Both sides of photos_00000 refuse writes" in each for each in problems)
    assert site.switch("photos", "--repair", "--json").json["ok"]
    assert site.writable() == ["db1"]


def test_a_topology_that_was_changed_by_hand_is_named(site: PairSite) -> None:
    groups = site.document()["groups"]
    groups["photos"]["RANGES"][0]["active"] = "db2"
    site.publish(groups)
    problems = site.manage("shards", "status", "--json").json["problems"]
    assert any("active side of photos_00000, photos_00001 refuses writes" in p for p in problems)
    assert "change it back" in site.switch("photos", "--repair", code=1).err
    assert site.writable() == ["db1"]
