"""The directory under races and rollbacks, with real processes and real transactions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from sharded_orm import runtime
from tests.integration.directory_race import KEYS, race
from tests.patience import PATIENCE
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES


def _settings(default: dict[str, Any], folder: Path) -> dict[str, Any]:
    node = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(folder)}
    return {
        "default": default,
        "sharded_orm": {
            "NODES": {"local": node},
            "GROUPS": {
                "photos": {
                    "STRATEGY": "directory",
                    "RANGES": [{"range": (0, 511), "primary": "local"}],
                }
            },
        },
    }


def test_processes_that_place_the_same_key_at_once_agree_on_sqlite(tmp_path: Path) -> None:
    default = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(tmp_path / "default.sqlite3"),
        "OPTIONS": {"timeout": PATIENCE},
    }
    first, *others = race(_settings(default, tmp_path))
    assert len(first) == KEYS
    assert all(other == first for other in others)


def test_processes_that_place_the_same_key_at_once_agree_on_mariadb(
    tmp_path: Path, mariadb: Any
) -> None:
    server = mariadb.django()
    default = {"ENGINE": "django.db.backends.mysql", "NAME": "directory_race", **server}
    with _database(server, "directory_race"):
        first, *others = race(_settings(default, tmp_path))
    assert len(first) == KEYS
    assert all(other == first for other in others)


class _database:
    """A schema that exists during the block."""

    def __init__(self, server: dict[str, Any], name: str) -> None:
        import MySQLdb

        connect = {
            "host": server.get("HOST"),
            "port": int(server.get("PORT") or 3306),
            "user": server.get("USER"),
            "passwd": server.get("PASSWORD", ""),
        }
        self._connection = MySQLdb.connect(**{k: v for k, v in connect.items() if v})
        self._name = name

    def __enter__(self) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {self._name}")
        self._execute(f"CREATE DATABASE {self._name}")

    def __exit__(self, *exc: object) -> None:
        self._execute(f"DROP DATABASE {self._name}")
        self._connection.close()

    def _execute(self, sql: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)


@pytest.mark.every_backend
@pytest.mark.django_db(databases=DATABASES, transaction=True)
class TestRollback:
    """Outside of ``TestCase``, so that transactions are real."""

    @pytest.mark.parametrize("outer", ["default", "directory", "photos"])
    def test_a_placement_survives_the_rollback_of_its_caller(self, outer: str) -> None:
        runtime.strategy("photos").forget()  # type: ignore[attr-defined]
        with pytest.raises(KeyError), transaction.atomic(using=outer):
            Photo.objects.create(user_id=70, title="first row")
            raise KeyError
        runtime.strategy("photos").forget()  # type: ignore[attr-defined]
        number = runtime.strategy("photos").locate(70)
        assert number is not None
        # If the shard's own transaction is not rolled back, its row is there. Either way the key
        # keeps its place, so that no row can stay behind on another shard.
        assert Photo.objects.filter(user_id=70).count() == (0 if outer == "photos" else 1)
        assert Photo.objects.create(user_id=70, title="x")._state.db == f"photos_{number:05d}"

    def test_an_autocommit_placement_is_committed_on_the_shared_connection(self) -> None:
        store = runtime.strategy("photos").store  # type: ignore[attr-defined]
        assert not connections["directory"].in_atomic_block
        assert store.place("photos", {"71": 5}) == {"71": (5, True)}


@pytest.mark.django_db(databases=DATABASES)
def test_inside_a_test_case_placements_are_rolled_back_and_not_remembered() -> None:
    strategy: Any = runtime.strategy("photos")
    strategy.forget()
    strategy.place(72)
    assert "72" not in strategy._placements
    assert strategy.store.find("photos", ["72"])["72"][1] is False
