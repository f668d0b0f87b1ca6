"""Promotions of a site that has its topology in ZooKeeper."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import service_missing
from tests.integration.promotion.site import Site
from tests.patience import PATIENCE
from tests.services import ServiceMissing
from tests.services.zookeeper import ZooKeeperServer


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeperServer]:
    try:
        with ZooKeeperServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def on_zookeeper(site: Site, zookeeper: ZooKeeperServer) -> Site:
    site.move_to_zookeeper(zookeeper)
    return site


def test_no_acknowledged_write_is_lost(on_zookeeper: Site) -> None:
    site = on_zookeeper
    with site.writers(3) as writers:
        report = site.promote("--json").json
        for number in writers.numbers:
            writers.wait_for_more(number)
    assert report["outcome"] == "promoted"
    assert site.is_promoted()
    rows = site.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
        assert all(site.is_refusal(code, text) for _, code, text in writers.errors(number))
    assert site.has_logged_nothing_since(report["position"], report["position"])
    print(f"refused for {report['refused_for']} s; silent for {writers.longest_silence():.3f} s")


def test_it_dies_while_the_map_is_published(on_zookeeper: Site, zookeeper: ZooKeeperServer) -> None:
    site = on_zookeeper
    with site.writers(2) as writers:
        site.promote_and_die("begin:switching")
        zookeeper.kill()
        done = site.promote(code=1, LOOK_UP="1")
        assert "is not known" in done.err
        zookeeper.start()
        # It published nothing: it is undone, and started again.
        site.promote("--abort")
        for number in writers.numbers:
            writers.wait_for_more(number)
        site.promote()
        for number in writers.numbers:
            writers.wait_for_more(number)
    assert site.is_promoted()
    rows = site.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows


def stopped(site: Site, where: str, **environment: str) -> subprocess.Popen[str]:
    """Return a promotion that is stopped at that point, and goes on with SIGCONT."""
    process = site.start("shards", "promote", "db1", STOP_AT=where, **environment)
    site.wait_for_run(where.partition(":")[2])
    return process


def go_on(process: subprocess.Popen[str]) -> str:
    """Let the promotion go on to its end, which is an error, and return its output."""
    os.kill(process.pid, signal.SIGCONT)
    _out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    return err


@pytest.fixture
def lost(zookeeper: ZooKeeperServer) -> Iterator[Callable[[], None]]:
    """Kill ZooKeeper in the middle of a test; it runs again afterwards."""
    yield zookeeper.kill
    if zookeeper.pid is None:
        zookeeper.start()


def test_it_is_gone_before_anything_is_fenced(on_zookeeper: Site, lost: Callable[[], None]) -> None:
    site = on_zookeeper
    with site.writers(1) as writers:
        process = stopped(site, "begin:checked")
        lost()
        error = go_on(process)
        writers.wait_for_more(0)
    assert re.search("ZooKeeper at .* (does|did) not answer", error)
    assert "Nothing was touched" in error
    assert "makes db1 read only" not in error
    assert not writers.errors(0)
    assert site.are_as_before()


def test_it_is_gone_before_the_map_was_sent(on_zookeeper: Site, lost: Callable[[], None]) -> None:
    """Nobody can have published anything, so it is undone without asking."""
    site = on_zookeeper
    with site.writers(1) as writers:
        process = stopped(site, f"begin:{site.last_before_switching}")
        lost()
        error = go_on(process)
        writers.wait_for_more(0)
    # By the time limit, or by the error of a connection that breaks first.
    assert re.search("ZooKeeper at .* (does|did) not answer", error)
    assert "Everything is as before" in error
    assert site.are_as_before()


def test_it_is_gone_when_the_map_may_have_been_sent(
    on_zookeeper: Site, lost: Callable[[], None], zookeeper: ZooKeeperServer
) -> None:
    site = on_zookeeper
    with site.writers(1) as writers:
        process = stopped(site, "begin:switching", LOOK_UP="7")
        lost()
        error = go_on(process)
        assert "writes to photos 0-1, photos 2-3, visits 0-0 are refused" in error
        assert "'manage.py shards promote db1'" in error
        assert "'manage.py shards promote db1 --abort'" in error
        assert site.is_read_only("first")
        zookeeper.start()
        site.promote("--abort")
        writers.wait_for_more(0)
    assert site.is_as_before()


def test_writers_need_not_wait_for_the_last_word(
    on_zookeeper: Site, lost: Callable[[], None], zookeeper: ZooKeeperServer
) -> None:
    """Writes are refused at once; when ZooKeeper is back, no operator is needed."""
    site = on_zookeeper
    process = stopped(site, "begin:switching", LOOK_UP="600")
    lost()
    os.kill(process.pid, signal.SIGCONT)
    assert process.stderr is not None
    line = ""
    while "are refused until" not in line:
        line = process.stderr.readline()
        assert line, "it has ended"
    zookeeper.start()
    _out, err = process.communicate(timeout=PATIENCE)
    # Nobody has published anything, so it is undone.
    assert process.returncode == 1
    assert "Everything is as before" in err
    assert site.is_as_before()
