"""A group grows while a process does not follow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import service_missing
from tests.integration.growing.scene import Scene
from tests.patience import PATIENCE
from tests.services import ServiceMissing
from tests.services.zookeeper import ZooKeeperServer


@pytest.fixture
def zookeeper() -> Iterator[ZooKeeperServer]:
    try:
        with ZooKeeperServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


def test_a_range_is_opened_when_every_process_knows_it(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    scene = Scene(tmp_path)
    scene.move_to_zookeeper(zookeeper)

    def new_range() -> dict[str, Any]:
        found: dict[str, Any] = scene.manage("topology", "pull").json
        entry: dict[str, Any] = found["groups"]["photos"]["RANGES"][1]
        return entry

    process = scene.start("scatter", str(scene.folder))
    scene.wait_for_scatter(2)
    process.send_signal(signal.SIGSTOP)
    try:
        told = scene.grow(code=1, PATIENCE="1").err
        assert f"({process.pid})" in told
        assert new_range()["open"] is False
    finally:
        process.send_signal(signal.SIGCONT)
    scene.wait_for_scatter(4)
    scene.grow()
    assert new_range()["open"] is True
    (scene.folder / "stop").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
