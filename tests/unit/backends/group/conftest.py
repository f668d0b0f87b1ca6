"""Sixteen shards in SQLite files of the test's own, with a table each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.db import connections

from sharded_orm import database_settings, runtime
from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Topology

GROUP = "photos"


class Shards:
    """The shards of one test: their connections, and the rows in their tables."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    @property
    def group(self) -> Any:
        return connections[GROUP]

    def alias(self, number: int) -> str:
        return f"{GROUP}_{number:05d}"

    def __getitem__(self, number: int) -> Any:
        return connections[self.alias(number)]

    def add(self, number: int, value: int) -> None:
        with self[number].cursor() as cursor:
            cursor.execute("INSERT INTO thing (value) VALUES (%s)", [value])

    def rows(self, number: int) -> list[int]:
        """Return the rows that another connection sees: the committed ones."""
        wrapper = self[number].copy()
        try:
            with wrapper.cursor() as cursor:
                cursor.execute("SELECT value FROM thing ORDER BY value")
                return [value for (value,) in cursor.fetchall()]
        finally:
            wrapper.close()

    def make_table(self, number: int) -> None:
        self[number].create_shard_database()
        with self[number].cursor() as cursor:
            cursor.execute("CREATE TABLE thing (value integer UNIQUE)")


@contextmanager
def using_nodes(
    nodes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **group: Any
) -> Iterator[Topology]:
    """Use the configured topology on other nodes, with new connections in this thread.

    :param nodes: nodes by the names of the configured ones.
    :param group: fields of the group to replace.
    """
    configured = runtime.config().topology
    groups = {**configured.groups, GROUP: replace(configured.groups[GROUP], **group)}
    moved = replace(configured, nodes=nodes, groups=groups)
    # Removes test databases that other tests of the run may have set up.
    monkeypatch.delitem(test_databases, GROUP, raising=False)
    before = runtime.topology()
    _drop_wrappers()
    runtime.swap(moved)
    settings = complete(database_settings.group_settings(moved.groups[GROUP]))
    try:
        with mock.patch.dict(connections.settings, {GROUP: settings}):
            yield moved
            _drop_wrappers()
    finally:
        runtime.swap(before)


@pytest.fixture
def folder(
    tmp_path: Path, django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Topology]:
    """The configured topology, with the nodes' files in a folder of the test's own."""
    nodes = {
        name: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(tmp_path / name)}
        for name in runtime.config().topology.nodes
    }
    with django_db_blocker.unblock(), using_nodes(nodes, monkeypatch) as topology:
        yield topology


@pytest.fixture
def shards(folder: Topology) -> Shards:
    shards = Shards(folder)
    for number in range(4):
        shards.make_table(number)
    return shards


def _drop_wrappers() -> None:
    group: Any = connections[GROUP]
    group.close()
    for wrapper in group.shards:
        group.shards.forget(wrapper)
    del connections[GROUP]
