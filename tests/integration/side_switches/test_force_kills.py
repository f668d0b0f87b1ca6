"""``shards switch --force`` killed with SIGKILL at each step: the same command again ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_force import GIVE_UP, assert_in_order, entry
from tests.integration.side_switches.test_kills import CLOSED, PUBLISHED, marked
from tests.services.replication import execute

_RECORD = "sharded_orm.operations.pairs.record.SwitchRecord"
_FENCE = "sharded_orm.backends.mysql.side_fence.MySQLSideFence"
_SIDE = "sharded_orm.backends.mysql.pair_side.MySQLPairSide"
#: Calls of the giving up of the first shard, in their order, and then of the second.
_CALLS = [
    f"{_RECORD}.enter:1",
    f"{_RECORD}.prepare:1",
    f"{_RECORD}.enter:2",
    "sharded_orm.operations.pairs.forced_switch.GivenUpSide.close:1",
    f"{_SIDE}.stop_receiving:1",
    f"{_SIDE}.stop:1",
    f"{_SIDE}.forget:1",
    f"{_RECORD}.enter:3",
    f"{_RECORD}.publish:1",
    f"{_RECORD}.enter:4",
    f"{_FENCE}.store_epoch:1",
    f"{_FENCE}.open:1",
    f"{_FENCE}.remove:1",
    f"{_RECORD}.end:1",
    "sharded_orm.operations.pairs.forced_switch.GivenUpSide.close:2",
    f"{_RECORD}.publish:2",
    f"{_FENCE}.store_epoch:2",
    f"{_RECORD}.end:2",
]
MOMENTS = [f"{side}:{call}" for call in _CALLS for side in ("before", "after")]
_PUBLISHED = f"after:{_RECORD}.publish:1"
_LAST = f"after:{_RECORD}.end:2"


@pytest.fixture
def site(durable_site: PairSite) -> PairSite:
    return durable_site


@pytest.mark.parametrize("moment", marked(MOMENTS, (_PUBLISHED,)))
def test_the_same_command_gives_up_a_living_side(
    site: PairSite, tmp_path: Path, moment: str
) -> None:
    """The side was cut off from the other side, so processes could write to both."""
    site.write_a_row(1)
    execute(site.pair.first, entry(2, 20))
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE IO_THREAD")
    execute(site.pair.first, entry(3, 30))
    with site.watched() as found:
        site.switch_and_die(moment, *GIVE_UP)
        is_early = site.writable() == ["db2"]
        if is_early:
            execute(site.pair.second, entry(4, 0))
        site.switch(*GIVE_UP)
    assert "both" not in found
    if not is_early:
        execute(site.pair.second, entry(4, 0))
    assert site.active() == ["db2"] * 4
    assert [site.writable(number) for number in (0, 1)] == [["db2"]] * 2
    rejoined = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path))
    assert rejoined.code == 0, rejoined.err
    assert_in_order(site)


@pytest.mark.parametrize("moment", marked(MOMENTS, (_LAST,)))
def test_the_same_command_gives_up_a_dead_side(site: PairSite, tmp_path: Path, moment: str) -> None:
    site.write_a_row(1)
    execute(site.pair.first, entry(2, 20))
    site.wait_until_equal()
    site.pair.first.kill()
    site.switch_and_die(moment, *GIVE_UP)
    site.switch(*GIVE_UP)
    assert site.active() == ["db2"] * 4
    site.as_application(site.pair.second, entry(4, 0))
    site.pair.first.start()
    rejoined = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path))
    assert rejoined.code == 0, rejoined.err
    assert_in_order(site)


@pytest.mark.parametrize(
    "command", [GIVE_UP, pytest.param(("photos", "--repair"), marks=pytest.mark.long)]
)
def test_a_side_that_is_back_before_the_command_is_ended_is_closed_first(
    site: PairSite, command: tuple[str, ...]
) -> None:
    site.pair.first.kill()
    site.switch_and_die(_PUBLISHED, *GIVE_UP)
    site.pair.first.start()
    # Somebody opens the side, or it was only cut off.
    execute(site.pair.first, "SET GLOBAL read_only = OFF")
    assert site.writable() == ["db1"]
    site.switch(*command)
    assert site.writable() == ["db2"]


@pytest.mark.parametrize(
    ("moment", "dead"),
    [
        pytest.param(CLOSED[0], "db1", marks=pytest.mark.long, id="before"),
        pytest.param(PUBLISHED[0], "db2", id="published"),
    ],
)
def test_a_side_that_dies_while_an_unfinished_switch_needs_it(
    site: PairSite, tmp_path: Path, moment: str, dead: str
) -> None:
    """The switch can be ended by nobody but the dead side. It is given up, too."""
    site.write_a_row(1)
    site.wait_until_equal()
    site.switch_and_die(moment, "photos", "0")
    server, other = (site.pair.first, "db2") if dead == "db1" else (site.pair.second, "db1")
    server.kill()
    site.switch("photos", "--all-from", dead, "--force", "--no-input")
    assert site.active() == [other] * 4
    survivor = site.pair.other(server)
    site.as_application(survivor, entry(2, 0))
    server.start()
    assert site.manage("pairs", "rejoin", dead, "--folder", str(tmp_path)).code == 0
    assert site.writable() == [other]
    assert site.all_rows() == {1, 2}
