"""The directory under races, rollbacks and outages, with real processes, transactions and servers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.exceptions import NoReachableShard
from sharded_orm.models import KeyMove
from sharded_orm.models.tables.directory import DatabaseDirectory
from tests.integration.directory_race import KEYS, race
from tests.patience import PATIENCE
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES
from tests.services.mariadb import Address, MariaDBServer
from tests.unit.backends.group.conftest import using_nodes


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
@pytest.mark.parametrize("call", ["find", "place", "moves"])
def test_an_error_for_want_of_the_tables_names_the_migration(call: str) -> None:
    arguments: dict[str, Any] = {
        "find": ("photos", ["1"]),
        "place": ("photos", {"1": 0}),
        "moves": (),
    }
    with pytest.raises(DatabaseError) as caught:
        getattr(DatabaseDirectory("tickets_1"), call)(*arguments[call])
    assert caught.value.__notes__ == [
        "The directory in 'tickets_1' lacks its tables: run 'manage.py migrate --database tickets_1'."
    ]


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
        assert store.place("photos", {"71": 5}) == {"71": (5, True, 0)}


@pytest.mark.django_db(databases=DATABASES)
def test_inside_a_test_case_placements_are_rolled_back_and_not_remembered() -> None:
    strategy: Any = runtime.strategy("photos")
    strategy.forget()
    strategy.place(72)
    assert "72" not in strategy._placements
    assert strategy.store.find("photos", ["72"])["72"][1] is False


@pytest.mark.every_backend
@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_the_directory_knows_the_keys_in_flight_and_counts_the_moves_of_each() -> None:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {"81": 5, "82": 5})
    assert store.moves().in_flight == ()
    values = {"group": "photos", "key": "81", "value": "81", "source": 5, "target": 9}
    former = KeyMove.objects.create(**values, phase="settled")
    KeyMove.objects.create(**values, phase="aborted")
    move = KeyMove.objects.create(**values, in_flight=True)
    for phase in ("announced", "switching"):
        KeyMove.objects.update(phase=phase)
        KeyMove.objects.filter(pk=former.pk).update(phase="settled")
    with CaptureQueriesContext(connections["directory"]) as captured:
        moves = store.moves()
    moving = ("photos", "81", "81", move.pk, 5, 9, "switching")
    assert moves == ((moving,), move.pk, ())
    assert len(captured) == 0  # It is not logged: assertNumQueries must not depend on the time.
    since = store.moves(since=former.pk)
    assert (since.in_flight, since.last) == ((moving,), move.pk)
    assert [(ended.number, ended.phase) for ended in since.ended] == [(move.pk - 1, "switching")]
    assert store.find("photos", ["81", "82"]) == {
        "81": (5, True, former.pk),
        "82": (5, True, 0),
    }
    KeyMove.objects.filter(pk=move.pk).update(phase="switched")
    assert store.find("photos", ["81"]) == {"81": (5, True, move.pk)}


# Shards 0 to 7 are on the first node of the group, 8 to 15 on the second.
FIRST, SECOND = "photos_00000", "photos_00008"


@pytest.fixture
def two_nodes(
    own_mariadb: MariaDBServer,
    mariadb: Address,
    monkeypatch: pytest.MonkeyPatch,
    transactional_db: None,
) -> Iterator[MariaDBServer]:
    """The first node is a server of the test's own; the second one answers."""
    first, second = (
        {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
        for address in (own_mariadb.address, mariadb)
    )
    names = list(runtime.config().topology.nodes)
    with using_nodes(dict(zip(names, (first, second), strict=True)), monkeypatch):
        yield own_mariadb
    if own_mariadb.pid is None:
        own_mariadb.start()


def nodes_of_new_keys(first_key: int, count: int = 40) -> set[str]:
    return {runtime.place("photos", key).node for key in range(first_key, first_key + count)}


@pytest.mark.django_db(databases=["directory", "photos"], transaction=True)
def test_no_new_key_is_placed_on_a_node_that_is_known_to_be_down(
    two_nodes: MariaDBServer,
) -> None:
    down, up = runtime.topology().nodes
    connections[FIRST].create_shard_database()  # type: ignore[attr-defined]
    placed = {key: runtime.place("photos", key) for key in range(1000, 1040)}
    assert {shard.node for shard in placed.values()} == {down, up}
    two_nodes.kill()
    with pytest.raises(OperationalError):
        connections[FIRST].cursor().execute("SELECT 1")
    assert nodes_of_new_keys(2000) == {up}
    # Keys that have a shard keep it.
    runtime.strategy("photos").forget()  # type: ignore[attr-defined]
    assert {key: runtime.place("photos", key) for key in placed} == placed
    two_nodes.start()
    connections[FIRST].cursor().execute("SELECT 1")
    assert nodes_of_new_keys(3000) == {down, up}


@pytest.mark.django_db(databases=["directory", "photos"], transaction=True)
def test_a_node_is_tried_again_before_a_new_key_is_placed_there(
    two_nodes: MariaDBServer,
) -> None:
    """Nobody but the directory asks for it: it may have no keys yet."""
    down, up = runtime.topology().nodes
    breaker = connections[FIRST].node_pool.breaker  # type: ignore[attr-defined]
    two_nodes.kill()
    with pytest.raises(OperationalError):
        connections[FIRST].ensure_connection()
    breaker.half_open(None)
    assert nodes_of_new_keys(4000) == {up}
    two_nodes.start()
    breaker.half_open(None)
    assert nodes_of_new_keys(5000) == {down, up}
    assert breaker.is_closed


@pytest.mark.django_db(databases=["directory", "photos"], transaction=True)
def test_if_all_nodes_are_down_a_new_key_is_refused_and_the_error_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as one, socket.socket() as two:
        nodes = {}
        for name, nobody in zip(runtime.config().topology.nodes, (one, two), strict=True):
            # The port is taken, and nobody listens.
            nobody.bind(("127.0.0.1", 0))
            address = Address("127.0.0.1", nobody.getsockname()[1], "u", "p")
            nodes[name] = {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
        with using_nodes(nodes, monkeypatch):
            for alias in (FIRST, SECOND):
                with pytest.raises(OperationalError):
                    connections[alias].ensure_connection()
            with pytest.raises(NoReachableShard, match=r"'manage\.py shards open'") as caught:
                runtime.place("photos", 6000)
            assert set(caught.value.causes) == set(nodes)
            assert all(name in str(caught.value) for name in nodes)
            # It waits for no server, and nothing was placed.
            assert runtime.locate("photos", 6000) is None
