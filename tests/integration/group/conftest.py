"""The shards of ``tests/unit/backends/group``, on MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sharded_orm import runtime
from tests.services.mariadb import Address
from tests.unit.backends.group.conftest import Shards, using_nodes


@pytest.fixture
def shards(
    mariadb_nodes: list[Address], django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shards]:
    names = runtime.config().topology.nodes
    nodes = {
        name: {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
        for name, address in zip(names, mariadb_nodes, strict=False)
    }
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
