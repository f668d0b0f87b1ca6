"""Writes that meet a switch wait in the database for its end, and then go to the new side at once."""

from __future__ import annotations

import time

import pytest

from tests.integration.promotion.site import PREAMBLE
from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_kills import CLOSED
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import execute

# A process that counts how often its write is sent, and how often it loads the topology.
COUNTED = f"""
from django.db import connections
from sharded_orm.backends.group import moved_shards
moved_shards._SWITCH_WAIT = {PATIENCE}
runtime.topology()
source, loads = runtime.source(), []
load = source.load
source.load = lambda: (loads.append(1), load())[1]
refusals = []
refused = moved_shards.PlaceWait.next_place
def next_place(self, *arguments, **options):
    refusals.append(1)
    return refused(self, *arguments, **options)
moved_shards.PlaceWait.next_place = next_place
Entry(entry_id=2, user_id=0).save()
print(len(refusals), len(loads))
"""


# In a transaction the refusal ends the transaction first, and the topology is loaded for its repetition.
@pytest.mark.parametrize(("is_cached", "counts"), [(False, "1 1"), (True, "2 2")])
def test_a_refused_write_is_sent_again_when_the_switch_has_ended(
    site: PairSite, is_cached: bool, counts: str, memcached: MemcachedServer
) -> None:
    if is_cached:
        # A write then opens a transaction of its own, which is repeated as a whole.
        site.use_cache(memcached)
    site.setting["MOVE_WAIT"] = PATIENCE
    site.save()
    operator = site.start("shards", "switch", "photos", "0", STOP_AT=CLOSED[1])
    wait_until_stopped(operator)
    assert site.writable() == []
    writer = site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{COUNTED}")
    deadline = time.monotonic() + PATIENCE
    while not execute(
        site.pair.first, "SELECT 1 FROM information_schema.processlist WHERE state = 'User lock'"
    ):
        assert writer.poll() is None, writer.communicate()
        assert time.monotonic() < deadline, "the writer does not wait"
        time.sleep(0.02)  # between two looks
    _out, err = go_on(operator)
    assert operator.returncode == 0, err
    out, err = writer.communicate(timeout=PATIENCE)
    assert (writer.returncode, out) == (0, f"{counts}\n"), err
    assert site.rows("second") == {2}


def test_a_write_that_an_operator_has_left_refused_tries_again(site: PairSite) -> None:
    """The session of a killed operator has no lock any more, so nothing holds up the write but the fence."""
    site.setting["MOVE_WAIT"] = PATIENCE
    site.save()
    site.switch_and_die(CLOSED[1], "photos", "0")
    writer = site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{COUNTED}")
    site.switch("photos", "--repair")
    out, err = writer.communicate(timeout=PATIENCE)
    assert writer.returncode == 0, f"{out}\n{err}"
    assert site.rows("first") == {2}
