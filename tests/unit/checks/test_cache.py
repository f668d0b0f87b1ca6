"""Every check of the cache reports its declaration, with its id and a hint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, models
from django.test import override_settings
from django.test.utils import isolate_apps

from sharded_orm import runtime
from sharded_orm.checks.cache import check_cache_aliases, check_cached_models
from sharded_orm.conf.nodes import backend_for
from sharded_orm.models import ExactCharField, GlobalModel, ShardedModel, TicketField
from tests.versions import HAS_DATABASE_ON_DELETE

LOCAL = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}


def messages(*classes: Any) -> list[Any]:
    app_config = type("Config", (), {"get_models": staticmethod(lambda: classes)})()
    found = check_cached_models([app_config])
    assert all(message.hint for message in found)
    return found


def ids(*classes: Any) -> set[str]:
    return {str(message.id).removeprefix("sharded_orm.") for message in messages(*classes)}


def declare(body: Callable[[], Any]) -> set[str]:
    with isolate_apps("tests.cached"):
        made = body()
        return ids(*made) if isinstance(made, tuple) else ids(made)


def sharded(shard_meta: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A model on ``events`` by ``user_id``, with ``cache = True``."""
    given = {"group": "events", "shard_key": "user_id", "cache": True, **(shard_meta or {})}
    body = {
        "__module__": __name__,
        "Meta": type("Meta", (), {"app_label": "cached"}),
        "ShardMeta": type("ShardMeta", (), given),
        "id": TicketField(primary_key=True),
        "user_id": models.BigIntegerField(),
        **fields,
    }
    return type("Thing", (ShardedModel,), body)


def everywhere(shard_meta: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A global model with ``cache = True``."""
    body = {
        "__module__": __name__,
        "Meta": type("Meta", (), {"app_label": "cached"}),
        "ShardMeta": type("ShardMeta", (), {"cache": True, **(shard_meta or {})}),
        **fields,
    }
    return type("Everywhere", (GlobalModel,), body)


def test_good_declarations_are_silent() -> None:
    assert not declare(sharded)
    assert not declare(lambda: sharded({"isolate_key": "topic"}, topic=models.IntegerField()))
    assert not declare(lambda: everywhere({"isolate_key": "day"}, day=models.DateField(null=True)))
    assert not declare(lambda: everywhere({"cache": False, "isolate_key": "nothing"}))


def test_the_models_of_the_tests_are_silent() -> None:
    assert check_cached_models() == []


def test_a_cached_model_in_a_database_of_another_engine() -> None:
    stock = {**connections.settings["default"], "ENGINE": "django.db.backends.sqlite3"}
    known = connections.settings["default"]
    connections.settings["default"] = stock
    try:
        assert declare(everywhere) == {"E026"}
        assert not declare(lambda: everywhere({"cache": False}))
        assert not declare(sharded)
    finally:
        connections.settings["default"] = known


@pytest.mark.skipif(not HAS_DATABASE_ON_DELETE, reason="of Django 6.1")
def test_the_database_changes_no_cached_rows() -> None:
    def refers(on_delete: Any, **shard_meta: Any) -> Callable[[], Any]:
        return lambda: everywhere(
            shard_meta, parent=models.ForeignKey("self", on_delete, null=True)
        )

    changing: Any = (models.DB_CASCADE, models.DB_SET_NULL)  # type: ignore[attr-defined,unused-ignore]
    for on_delete in changing:
        assert "E075" in declare(refers(on_delete))
        assert "E075" not in declare(refers(on_delete, cache=False))
    assert "E075" not in declare(refers(models.CASCADE))


def test_an_engine_derived_from_ours_is_good() -> None:
    # The connection class of a group derives from the engine of its nodes.
    assert declare(everywhere) == set()
    known = connections.settings["default"]
    connections.settings["default"] = {**known, "ENGINE": "sharded_orm.backends.sqlite3"}
    try:
        assert not declare(everywhere)
    finally:
        connections.settings["default"] = known


def test_no_cache() -> None:
    without = {key: value for key, value in settings.SHARDED_ORM.items() if key != "CACHE"}
    with override_settings(SHARDED_ORM=without):
        assert declare(lambda: (sharded(), everywhere({"cache": False}))) == {"W027"}
        assert not declare(lambda: sharded({"cache": False}))
        assert check_cache_aliases() == []


def aliases(caches: dict[str, Any], **cache: Any) -> list[Any]:
    setting = {**settings.SHARDED_ORM, "CACHE": {"OBJECTS": "default", **cache}}
    with override_settings(CACHES=caches, SHARDED_ORM=setting):
        found = check_cache_aliases()
    assert all(message.hint for message in found)
    return [(str(m.id).removeprefix("sharded_orm."), m.msg) for m in found]


def test_an_alias_that_is_not_there() -> None:
    found = aliases({"default": LOCAL}, LISTS="lists", OBJECTS="objects")
    assert [number for number, _ in found] == ["E028", "E028"]
    assert "OBJECTS names 'objects'" in found[0][1]
    assert "LISTS names 'lists'" in found[1][1]


@override_settings(DEBUG=True)
def test_a_backend_that_cannot_be_used() -> None:
    database = {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "redis://:s3cret@host",
    }
    ((number, message),) = aliases({"default": database})
    assert number == "E029"
    assert "DatabaseCache" in message
    assert "s3cret" not in message
    nowhere = {"BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache"}
    ((number, message),) = aliases({"default": nowhere})
    assert number == "E029"
    assert "LOCATION" in message
    assert aliases({"default": LOCAL}) == []


def test_the_memory_of_a_process_is_for_one_process() -> None:
    ((number, _),) = aliases({"default": LOCAL})
    assert number == "W030"
    with override_settings(DEBUG=True):
        assert aliases({"default": LOCAL}) == []
    memcached = {
        "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
        "LOCATION": "127.0.0.1:1",
    }
    assert aliases({"default": memcached}) == []


@pytest.mark.parametrize("name", ["topics", "user_id", "tags", "things", 5])
def test_an_isolate_key_that_cannot_be_one(name: str) -> None:
    def body() -> Any:
        tag = type(
            "Tag",
            (ShardedModel,),
            {
                "__module__": __name__,
                "Meta": type("Meta", (), {"app_label": "cached"}),
                "ShardMeta": type("ShardMeta", (), {"group": "events", "shard_key": "id"}),
                "id": TicketField(primary_key=True),
            },
        )
        return sharded({"isolate_key": name}, tags=models.ManyToManyField(tag))

    assert declare(body) == {"E031"}


def test_an_isolate_key_may_be_a_foreign_key_by_either_name() -> None:
    def body(name: str) -> Any:
        other = everywhere({"cache": False})
        field = models.ForeignKey(other, models.DO_NOTHING, db_constraint=False, related_name="+")
        return sharded({"isolate_key": name}, place=field)

    assert not declare(lambda: body("place"))
    assert not declare(lambda: body("place_id"))


@pytest.mark.parametrize(
    "field",
    [
        models.CharField(max_length=20, db_collation="NOCASE"),
        models.TextField(db_collation="utf8mb4_general_ci"),
        models.DecimalField(max_digits=5, decimal_places=2),
        models.FloatField(),
        models.DateTimeField(),
    ],
)
def test_a_key_whose_values_have_several_spellings(field: Any) -> None:
    with isolate_apps("tests.cached"):
        found = messages(sharded({"isolate_key": "topic"}, topic=field))
    assert [str(message.id) for message in found] == ["sharded_orm.E032"]
    assert "isolate key 'topic'" in found[0].msg
    with isolate_apps("tests.cached"):
        key = type(field)(**field.deconstruct()[3])
        assert ids(sharded({"shard_key": "topic"}, topic=key)) == {"E032"}
    with isolate_apps("tests.cached"):
        again = type(field)(**{**field.deconstruct()[3], "primary_key": True})
        assert ids(sharded(id=again)) == {"E032"}


@pytest.mark.mysql_settings
def test_text_on_mysql_needs_an_exact_collation() -> None:
    def text(collation: str | None) -> Any:
        return models.CharField(max_length=20, db_collation=collation)

    with isolate_apps("tests.cached"):
        (found,) = messages(everywhere({"isolate_key": "name"}, name=text(None)))
    assert found.id == "sharded_orm.E032"
    assert "db_collation='utf8mb4_bin'" in found.hint
    for good in (text("utf8mb4_bin"), ExactCharField(max_length=20)):
        assert not declare(lambda field=good: everywhere({"isolate_key": "name"}, name=field))
    with isolate_apps("tests.cached"):
        # The cache accepts it, the router does not.
        (found,) = messages(sharded({"shard_key": "topic"}, topic=text(None)))
    assert "db_collation='utf8mb4_nopad_bin'" in found.hint


def test_a_child_table_is_not_cached() -> None:
    def body(**shard_meta: Any) -> Any:
        parent = sharded()
        meta = type("ShardMeta", (parent.ShardMeta,), shard_meta)
        child = type(
            "Child",
            (parent,),
            {
                "__module__": __name__,
                "Meta": type("Meta", (), {"app_label": "cached"}),
                **({"ShardMeta": meta} if shard_meta else {}),
            },
        )
        return (parent, child)

    assert not declare(body)
    assert not declare(lambda: body(cache=False))
    assert declare(lambda: body(cache=True)) == {"E033"}


def test_a_table_that_others_write() -> None:
    meta = type("Meta", (), {"app_label": "cached", "managed": False})
    assert declare(lambda: sharded(Meta=meta)) == {"W034"}


@pytest.mark.parametrize(
    "shard_meta",
    [
        {"cached": True},
        {"isolate": "x"},
        {"cache": 1},
        {"cache": "yes"},
        {"cache": None},
        {"same_key": 0},
    ],
)
def test_names_and_values_of_shard_meta(shard_meta: dict[str, Any]) -> None:
    assert declare(lambda: sharded(shard_meta)) == {"E035"}


def test_the_shard_meta_of_an_abstract_base_is_checked() -> None:
    def body() -> Any:
        abstract = type("Meta", (), {"app_label": "cached", "abstract": True})
        base = sharded({"cached": True}, Meta=abstract)
        child = {"__module__": __name__, "Meta": type("Meta", (), {"app_label": "cached"})}
        return type("Child", (base,), child)

    assert declare(body) == {"E035"}


def test_a_global_model_has_no_group() -> None:
    assert declare(lambda: everywhere({"group": "photos"})) == {"E035"}


def test_a_broken_shard_meta_is_left_to_its_own_check() -> None:
    assert not declare(lambda: sharded({"shard_key": "nothing"}))
    assert not declare(lambda: sharded({"shard_key": None}))
    assert not declare(lambda: sharded({"group": "nowhere"}))


@pytest.mark.mysql_settings
def test_the_isolation_level_that_the_server_has() -> None:
    """Without a level, it may be READ UNCOMMITTED, so the cache is not used in autocommit either."""
    known = connections.settings["default"]
    for options, count in (({"isolation_level": None}, 1), ({"isolation_level": ""}, 1), ({}, 0)):
        connections.settings["default"] = {**known, "OPTIONS": options}
        try:
            with isolate_apps("tests.cached"):
                warnings = messages(everywhere())
        finally:
            connections.settings["default"] = known
        assert [warning.id for warning in warnings] == ["sharded_orm.W036"] * count
        for warning in warnings:
            assert (
                "so only the server knows it: nothing is read from the cache there." in warning.msg
            )


@pytest.mark.mysql_settings
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("repeatable read", {"W036"}),
        ("SERIALIZABLE", {"W036"}),
        ("read committed", set()),
    ],
)
def test_an_isolation_level_that_keeps_old_rows(level: str, expected: set[str]) -> None:
    check_isolation_level(level, expected)


@pytest.mark.postgresql_settings
@pytest.mark.parametrize(
    ("level", "expected"),
    # The numbers are those of psycopg's IsolationLevel. None stands for the server's default.
    [(None, {"W036"}), (1, set()), (2, set()), (3, {"W036"}), (4, {"W036"})],
)
def test_an_isolation_level_of_postgresql(level: int | None, expected: set[str]) -> None:
    check_isolation_level(level, expected)


def check_isolation_level(level: Any, expected: set[str]) -> None:
    known = connections.settings["default"]
    options = {**known["OPTIONS"], "isolation_level": level}
    connections.settings["default"] = {**known, "OPTIONS": options}
    try:
        assert declare(everywhere) == expected
        assert not declare(sharded)
    finally:
        connections.settings["default"] = known
    nodes = {
        name: {**node, "OPTIONS": {**node.get("OPTIONS", {}), "isolation_level": level}}
        for name, node in runtime.topology().nodes.items()
    }
    swapped = runtime._topology  # of a test run with databases
    runtime.swap(replace(runtime.topology(), nodes=nodes))
    try:
        assert declare(sharded) == expected
    finally:
        runtime.swap(swapped)


def test_the_backend_for_the_same_database_is_named() -> None:
    assert backend_for("django.db.backends.postgresql") == "'sharded_orm.backends.postgresql'"
    assert backend_for("django.contrib.gis.db.backends.postgis").startswith("one of ['sharded_orm.")
