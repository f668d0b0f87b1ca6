"""Promotions of a site that has its topology in ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import service_missing
from tests.integration.promotion.scene import Scene
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
def on_zookeeper(scene: Scene, zookeeper: ZooKeeperServer) -> Scene:
    scene.move_to_zookeeper(zookeeper)
    return scene


def test_no_acknowledged_write_is_lost(on_zookeeper: Scene) -> None:
    scene = on_zookeeper
    with scene.writers(3) as writers:
        report = scene.promote("--json").json
        for number in writers.numbers:
            writers.wait_for_more(number)
    assert report["outcome"] == "promoted"
    assert scene.is_promoted()
    rows = scene.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
        assert {code for _, code, _ in writers.errors(number)} <= {1290}
    assert scene.logged("first") == report["position"]
    print(f"refused for {report['refused_for']} s; silent for {writers.longest_silence():.3f} s")


def test_it_dies_while_the_map_is_published(
    on_zookeeper: Scene, zookeeper: ZooKeeperServer
) -> None:
    scene = on_zookeeper
    with scene.writers(2) as writers:
        scene.promote_and_die("begin:switching")
        zookeeper.kill()
        done = scene.promote(code=1, LOOK_UP="1")
        assert "is not known" in done.err
        zookeeper.start()
        # It published nothing: undone, and begun anew.
        scene.promote("--abort")
        for number in writers.numbers:
            writers.wait_for_more(number)
        scene.promote()
        for number in writers.numbers:
            writers.wait_for_more(number)
    assert scene.is_promoted()
    rows = scene.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
