"""Shards on SQLite: a file per shard, which exists only if it was created on purpose."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connections

from sharded_orm.exceptions import ShardDatabaseMissing
from sharded_orm.topology.model import Topology

from .conftest import Shards


def file_of(alias: str) -> Path:
    return Path(connections[alias].settings_dict["NAME"])


def test_missing_file_is_an_error_and_is_not_made(folder: Topology) -> None:
    with pytest.raises(ShardDatabaseMissing) as caught:
        connections["photos_00003"].cursor()
    message = str(caught.value)
    assert "'photos_00003'" in message
    assert "'local_1'" in message
    assert "manage.py migrate_shards --create" in message
    assert "manage.py migrate --database photos_00003" in message
    assert isinstance(caught.value, OperationalError)
    assert not file_of("photos_00003").exists()


def test_create_shard_database(folder: Topology) -> None:
    wrapper = connections["photos_00003"]
    wrapper.create_shard_database()  # type: ignore[attr-defined]
    assert file_of("photos_00003").exists()
    with wrapper.cursor() as cursor:
        cursor.execute("CREATE TABLE thing (value integer)")
    wrapper.create_shard_database()  # type: ignore[attr-defined]
    with wrapper.cursor() as cursor:
        assert wrapper.introspection.table_names(cursor) == ["thing"]


def test_migrate_creates_the_file(folder: Topology) -> None:
    call_command("migrate", database="photos_00003", verbosity=0)
    with connections["photos_00003"].cursor() as cursor:
        tables = connections["photos_00003"].introspection.table_names(cursor)
    assert "django_migrations" in tables


def test_other_errors_are_not_taken_for_a_missing_file(folder: Topology) -> None:
    path = file_of("photos_00003")
    path.mkdir(parents=True)
    with pytest.raises(OperationalError) as caught:
        connections["photos_00003"].cursor()
    assert not isinstance(caught.value, ShardDatabaseMissing)


@pytest.mark.parametrize("in_tests", [False, True])
def test_a_file_that_is_no_database_is_not_left_open(
    in_tests: bool, folder: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    closed: list[sqlite3.Connection] = []

    class Recorded(sqlite3.Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            opened.append(self)

        def close(self) -> None:
            super().close()
            closed.append(self)

    wrapper: Any = connections["photos_00003"]
    # A test database has statements of its own, the first ones that read the file.
    monkeypatch.setattr(wrapper, "_touched", set() if in_tests else None)
    monkeypatch.setitem(wrapper.settings_dict, "OPTIONS", {"factory": Recorded})
    wrapper.create_shard_database()
    file_of("photos_00003").write_bytes(b"nothing that SQLite knows" * 1000)
    with pytest.raises(DatabaseError, match="not a database"), wrapper.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM sqlite_master")
    wrapper.close()
    assert len(opened) == 1
    assert closed == opened


def test_strange_names(folder: Topology, tmp_path: Path) -> None:
    wrapper = connections["photos_00003"]
    wrapper.settings_dict["NAME"] = str(tmp_path / "a ?b#c%20d" / "é.sqlite3")
    wrapper.create_shard_database()  # type: ignore[attr-defined]
    with wrapper.cursor() as cursor:
        cursor.execute("CREATE TABLE thing (value integer)")
    wrapper.close()
    assert [path.name for path in tmp_path.rglob("*.sqlite3")] == ["é.sqlite3"]


def test_shards_are_apart(shards: Shards) -> None:
    shards.add(0, 1)
    assert (shards.rows(0), shards.rows(1)) == ([1], [])


def test_open_files_are_bounded(folder: Topology) -> None:
    group = connections["photos"]
    assert group.shards.limit == 128  # type: ignore[attr-defined]
