from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.promotion.scene import Scene
from tests.services import ServiceMissing
from tests.services.replication import Pair, replicated_pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two servers for all tests of this folder, which kill and promote them as they like."""
    try:
        with replicated_pair() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def scene(pair: Pair, tmp_path: Path) -> Scene:
    """The second server follows the first; nobody has written anything."""
    scene = Scene(pair, tmp_path)
    scene.begin()
    return scene
