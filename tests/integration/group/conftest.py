"""The shards of ``tests/unit/backends/group``, on MariaDB and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sharded_orm import runtime
from tests.unit.backends.group.conftest import Shards, using_nodes


@pytest.fixture(params=["mariadb", "postgresql"])
def nodes(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The settings of two nodes, with the names of the configured ones."""
    addresses = request.getfixturevalue(f"{request.param}_nodes")
    settings = (
        {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
        if request.param == "mariadb"
        else address.node()
        for address in addresses
    )
    return dict(zip(runtime.config().topology.nodes, settings, strict=False))


@pytest.fixture
def shards(
    nodes: dict[str, dict[str, Any]], django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shards]:
    with (
        django_db_blocker.unblock(),
        using_nodes(nodes, monkeypatch, database_name="group_transactions_{shard:03d}") as topology,
    ):
        shards = Shards(topology)
        numbers = (0, 1, 2, 3, 8)
        try:
            for number in numbers:
                shards.make_table(number)
            yield shards
        finally:
            for number in numbers:
                shards[number].drop_shard_database()
