"""``DATABASES`` knows every shard and iterates over none of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from django.core.handlers.base import BaseHandler
from django.db import close_old_connections, connections, reset_queries
from django.db.utils import ConnectionDoesNotExist, ConnectionHandler

from sharded_orm import database_settings, runtime
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.aliases import ShardedDatabases, sharded_databases
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology
from tests.patience import PATIENCE

SHARDS = 4096
DEFAULT = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}


@pytest.fixture
def many(tmp_path: object) -> Iterator[ShardedDatabases]:
    node = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(tmp_path), "PASSWORD": "s"}
    group = ShardGroup("fleet", (ShardRange(0, SHARDS - 1, "local"),), "modulo")
    runtime.swap(Topology({"local": node}, {"fleet": group}))
    try:
        yield sharded_databases({name: dict(value) for name, value in DEFAULT.items()})
    finally:
        runtime.swap(None)


def test_iteration_yields_explicit_aliases_and_groups_only(many: ShardedDatabases) -> None:
    handler = ConnectionHandler(many)
    assert list(handler) == list(many) == list(many.keys()) == ["default", "fleet"]
    assert len(many) == len(many.values()) == len(many.items()) == 2
    for number in range(0, SHARDS, 7):
        assert many[f"fleet_{number:05d}"]["NAME"].endswith(f"fleet_{number:05d}.sqlite3")
    assert list(handler) == ["default", "fleet"]


def test_answers_for_every_shard_and_no_other(many: ShardedDatabases) -> None:
    assert "fleet_04095" in many
    assert many.get("fleet_04096") is None
    for wrong in ("fleet_04096", "fleet_1", "fleets_00001", 5):
        assert wrong not in many
        with pytest.raises(KeyError):
            many[wrong]  # type: ignore[index]
    handler = ConnectionHandler(many)
    for unknown in (
        "fleet_99999", "fleet_" + "9" * 5000, "fleet_\u0660\u0660\u0660\u0660\u0661",
        "fleet_0000\u00b2", "fleet_000001", "_", "",
    ):  # fmt: skip
        with pytest.raises(ConnectionDoesNotExist):
            handler[unknown]
    settings = many["fleet_00001"]
    assert settings["ATOMIC_REQUESTS"] is False
    assert settings["TEST"]["MIRROR"] is None


def test_a_shard_named_on_the_command_line_is_offered(many: ShardedDatabases) -> None:
    many.expose(["migrate", "--database", "fleet_00007", "--database=fleet_00008", "--database"])
    assert list(many) == ["default", "fleet_00007", "fleet_00008", "fleet"]


def test_a_group_may_not_have_the_name_of_an_alias(many: ShardedDatabases) -> None:
    many["fleet"] = {}
    with pytest.raises(InvalidConfiguration, match="'fleet'"):
        many.add_groups()


@pytest.mark.django_db(databases="__all__")
def test_what_django_does_per_request_visits_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    def visited(group: ShardGroup) -> None:
        raise AssertionError(f"all shards of {group.name} are visited")

    monkeypatch.setattr(ShardGroup, "shards", visited)
    reset_queries()
    close_old_connections()
    BaseHandler().make_view_atomic(lambda request: None)
    assert "photos_00001" not in list(connections)


def test_two_threads_may_be_the_first(
    many: ShardedDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    other = threading.Thread(target=lambda: seen.append(list(many)))
    make = database_settings.group_settings

    def meanwhile(group: ShardGroup, among: object) -> dict[str, object]:
        other.start()
        other.join(0.2)  # waits for this thread
        return make(group, among)

    monkeypatch.setattr(database_settings, "group_settings", meanwhile)
    assert list(many) == ["default", "fleet"]
    other.join(PATIENCE)
    assert seen == [["default", "fleet"]]
