"""A group grows while a process does not follow the topology."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import service_missing
from tests.integration.growth.site import Site
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
    site = Site(tmp_path)
    site.move_to_zookeeper(zookeeper)

    def new_range() -> dict[str, Any]:
        found: dict[str, Any] = site.manage("topology", "pull").json
        entry: dict[str, Any] = found["groups"]["photos"]["RANGES"][1]
        return entry

    def connected() -> set[int]:
        processes = site.manage("topology", "show", "--json").json["processes"]
        return {one["pid"] for one in processes}

    process = site.start("scatter", str(site.folder))
    site.wait_for_scatter(2)
    end = time.monotonic() + PATIENCE
    while process.pid not in connected():
        assert time.monotonic() < end, "the process is not connected"
    process.send_signal(signal.SIGSTOP)
    try:
        error = site.grow(code=1, PATIENCE="1").err
        assert f"({process.pid})" in error
        assert new_range()["open"] is False
    finally:
        process.send_signal(signal.SIGCONT)
    site.wait_for_scatter(4)
    site.grow()
    assert new_range()["open"] is True
    (site.folder / "stop").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
