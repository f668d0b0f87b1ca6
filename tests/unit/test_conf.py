"""``SHARDED_ORM`` is checked as a whole: one error lists everything."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from sharded_orm import conf
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.document import Document

GOOD: dict[str, Any] = {
    "NODES": {"a": {"ENGINE": "sharded_orm.backends.mysql", "HOST": "one", "PASSWORD": "s3cret"}},
    "GROUPS": {
        "photos": {"STRATEGY": "modulo", "RANGES": [{"range": (0, 511), "primary": "a"}]},
    },
}


def broken(**changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = value
    return raw


def cached(**changes: Any) -> dict[str, Any]:
    return broken(CACHE={"OBJECTS": "default", **changes})


def test_a_good_setting() -> None:
    config = conf.parse(GOOD)
    assert config.topology.groups["photos"].count == 512
    assert (config.directory, config.tickets, config.max_idle_aliases) == ("default", (), 1024)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (
            {"GROUPS": {"photos": "directory"}},
            "group 'photos': must be a dict such as {'STRATEGY': 'directory', 'RANGES': […]}, not 'directory'",
        ),
        ({"GROUPS": ["photos"]}, "GROUPS must be a dict, not list"),
        ({"NODES": ["a"]}, "NODES must be a dict, not list"),
        ({"NODES": {"a": 3}}, "node 'a': must be a dict like an entry of DATABASES"),
    ],
)
@pytest.mark.parametrize("is_empty", [False, True])
def test_what_is_wrong_is_named_although_a_document_replaces_it(
    wrong: dict[str, Any], expected: str, is_empty: bool
) -> None:
    ranges = {"RANGES": [{"range": [0, 1], "primary": "a"}]}
    document = Document(1, {}, {}) if is_empty else Document(1, GOOD["NODES"], {"photos": ranges})
    with pytest.raises(InvalidConfiguration) as caught:
        conf.parse(broken(**wrong), document)
    assert any(problem.startswith(expected) for problem in caught.value.problems)


def test_a_pair_has_a_primary_and_a_replica() -> None:
    """What is no part of pairs need not know them: the active side is the primary."""
    pair = {"pair": ["a", "b"], "open": False}
    ranges = [
        {"range": (0, 1), **pair, "active": "a"},
        {"range": (2, 3), **pair, "active": "b"},
        {"range": (4, 4), "primary": "a", "replica": "b"},
    ]
    nodes = {name: {**GOOD["NODES"]["a"], "HOST": name} for name in "ab"}
    group = conf.parse(broken(NODES=nodes, GROUPS__photos__RANGES=ranges)).topology.groups["photos"]
    assert [(r.primary, r.replica, r.is_pair, r.open) for r in group.ranges] == [
        ("a", "b", True, False),
        ("b", "a", True, False),
        ("a", "b", False, True),
    ]


def test_the_options_of_tickets() -> None:
    assert conf.parse(GOOD).ticket_options == conf.TicketOptions(2.0, 5.0, 1, "proceed")
    given = {"TIMEOUT": 1, "BACKOFF": 0.5, "BLOCK_SIZE": 1000, "PARTNER_DOWN": "refuse"}
    config = conf.parse(broken(TICKET_OPTIONS=given))
    assert config.ticket_options == conf.TicketOptions(1, 0.5, 1000, "refuse")


def test_the_options_of_the_cache() -> None:
    assert conf.parse(GOOD).cache is None
    assert conf.parse(broken(CACHE=None)).cache is None
    assert conf.parse(broken(CACHE={"OBJECTS": "a"})).cache == conf.CacheOptions("a", "a")
    given = {
        "OBJECTS": "a", "LISTS": "b", "PREFIX": "site:1", "TTL": 60, "TIMEOUT": 0.1, "BACKOFF": 5,
        "COMMIT_WITHIN": 1, "QUARANTINE": 3,
    }  # fmt: skip
    cache = conf.parse(broken(CACHE=given, ON_CACHE_FAILURE="proceed")).cache
    assert cache == conf.CacheOptions("a", "b", "site:1", 60, 0.1, 5, 1, 3, "proceed")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([], "must be a dict"),
        (broken(NODE={}), "unknown key 'NODE'; valid keys are"),
        (broken(NODES__a__HOSTS="x"), "unknown key 'HOSTS'"),
        (broken(NODES__a__ENGINE="django.db.backends.mysql"), "ENGINE must be one of"),
        (broken(NODES__a__NAME="x"), "NAME is not allowed"),
        (broken(NODES__a__PORT="abc"), "node 'a': PORT must be a number such as 3306, not 'abc'"),
        (broken(NODES__a__PORT=[3306]), "node 'a': PORT must be a number, not list"),
        (
            broken(GROUPS__photos="directory"),
            "group 'photos': must be a dict such as {'STRATEGY': 'directory', 'RANGES': […]},"
            " not 'directory'",
        ),
        (
            broken(NODES__a__ENGINE="sharded_orm.backends.postgresql"),
            "NAME must be the database that holds the shards' schemas",
        ),
        (
            broken(
                NODES__a={
                    "ENGINE": "sharded_orm.backends.postgresql",
                    "NAME": "site",
                    "OPTIONS": {"options": "-c search_path=photos"},
                }
            ),
            "node 'a': OPTIONS['options'] must not set search_path; DATABASE_NAME of the group",
        ),
        (broken(NODES__a__SCHEMA="photos_00000"), "unknown key 'SCHEMA'"),
        (broken(NODES__a={"ENGINE": "sharded_orm.backends.sqlite3"}), "NAME must be the folder"),
        (broken(NODES__b=3), "must be a dict like an entry of DATABASES"),
        (broken(GROUPS__photos__STRATEGY=None), "STRATEGY must be"),
        (broken(GROUPS__photos__RANGES=7), "RANGES must be a list"),
        (broken(GROUPS__photos__RANGES=[{"range": 7, "primary": "a"}]), "a range needs"),
        (broken(GROUPS__photos__RANGES=[{"range": (0, 1), "master": "a"}]), "unknown key 'master'"),
        (broken(GROUPS__photos__STRATEGY_OPTIONS=1), "STRATEGY_OPTIONS must be a dict"),
        (broken(TICKETS=["t", "t"]), "twice"),
        (broken(TICKETS="t"), "must be a list"),
        (broken(TICKET_OPTIONS=3), "TICKET_OPTIONS must be a dict"),
        (broken(TICKET_OPTIONS={"BLOCKS": 5}), "unknown key 'BLOCKS'"),
        (broken(TICKET_OPTIONS={"TIMEOUT": 0}), "TIMEOUT must be a positive number"),
        (broken(TICKET_OPTIONS={"BACKOFF": math.inf}), "BACKOFF must be a positive number"),
        (broken(TICKET_OPTIONS={"BLOCK_SIZE": 0}), "BLOCK_SIZE must be a number from 1"),
        (broken(TICKET_OPTIONS={"BLOCK_SIZE": True}), "BLOCK_SIZE must be a number from 1"),
        (broken(TICKET_OPTIONS={"PARTNER_DOWN": "wait"}), "must be 'proceed' or 'refuse'"),
        (broken(MAX_IDLE_ALIASES=0), "positive number"),
        (broken(PLACEMENT_LEASE=0), "PLACEMENT_LEASE must be a positive number of seconds"),
        (broken(MOVE_WAIT="2"), "MOVE_WAIT must be a positive number of seconds"),
        (broken(BOUND_KEY=7), "dotted path of a function"),
        (broken(DIRECTORY=3), "DIRECTORY must be an alias"),
        (broken(NODES__a__OPTIONS="x"), "OPTIONS must be a dict"),
        (broken(NODES__a__ENGINE=5), "ENGINE must be one of"),
        (broken(NODES={1: {}, "a": {}}), "its name must be text"),
        *(
            (
                broken(NODES__a__CAPACITY=capacity),
                "node 'a': CAPACITY must be a number from 0 to 1,000,000",
            )
            for capacity in (-1, math.nan, math.inf, True, "1", None)
        ),
        (broken(NODE_DEFAULTS={"CAPACITY": 1}), "NODE_DEFAULTS: unknown key 'CAPACITY'"),
        (
            broken(GROUPS__photos__RANGES=[{"range": (0, 1), "primary": "a", "pinned": 1}]),
            "pinned must be True or False",
        ),
        (broken(GROUPS__photos__ATOMIC_REQUESTS="no"), "must be True or False"),
        (broken(GROUPS__photos__CHECK_NEW_KEYS=1), "CHECK_NEW_KEYS must be True or False"),
        (broken(GROUPS__photos__FORMER_MODELS=["Photo"]), "a list of names such as 'photos.Photo'"),
        (broken(GROUPS__photos__FORMER_MODELS="photos.Photo.x"), "a list of names such as"),
        (broken(GROUPS__photos__RANGES=[{"range": (False, True), "primary": "a"}]), "range needs"),
        (
            broken(GROUPS__photos__RANGES=[{"range": (0, 1), "primary": "a", "replica": ["b"]}]),
            "replica must be a node",
        ),
        *(
            (broken(GROUPS__photos__RANGES=[{"range": (0, 1), **entry}]), problem)
            for entry, problem in (
                ({"pair": ["a", "b"]}, "a range needs"),
                ({"active": "a"}, "a range needs"),
                ({"primary": "a", "active": "a"}, "a range needs"),
                ({"pair": ["a"], "active": "a"}, "a range needs"),
                ({"pair": ["a", "a"], "active": "a"}, "pair names 'a' twice"),
                ({"pair": ["a", "b"], "active": "c"}, "active must be one of the pair ['a', 'b']"),
                ({"pair": ["a", "b"], "active": "a", "epoch": -1}, "epoch must be a number from 0"),
                ({"primary": "a", "epoch": 1}, "only a range with 'pair' has an epoch"),
                (
                    {"pair": ["a", "b"], "active": "a", "primary": "a", "replica": "b"},
                    "it has 'pair' and ['primary', 'replica']",
                ),
                ({"pair": ["a", "b"], "active": "a"}, "names the unknown replica 'b'"),
            )
        ),
        (
            broken(GROUPS__photos__RANGES=[{"range": (0, 1), "primary": "a", "weight": math.nan}]),
            "weight must be a number from 0 to 1,000,000, not nan",
        ),
        *(
            (
                broken(
                    GROUPS__photos__RANGES=[{"range": (0, 1), "primary": "a", "weight": weight}]
                ),
                "range (0, 1): weight must be a number from 0 to 1,000,000",
            )
            for weight in (1e308, 10**400, -(10**400), math.inf, -1, 1_000_001, True, "1")
        ),
        (
            broken(GROUPS__photos__RANGES=[{"range": (0, 30_000_000), "primary": "a"}]),
            "range (0, 30000000): a group has at most 65,536 shards",
        ),
        (broken(CACHE="redis://:s3cret@host"), "CACHE must be a dict, not str"),
        (broken(CACHE={}), "OBJECTS must be an alias of CACHES, not None"),
        (cached(LISTS=3), "LISTS must be an alias of CACHES, not 3"),
        (cached(LOCATION="x"), "CACHE: unknown key 'LOCATION'; valid keys are"),
        (cached(PREFIX="a b"), "PREFIX must be at most 32 letters"),
        (cached(PREFIX="x" * 33), "PREFIX must be at most 32 letters"),
        (cached(PREFIX="a\n"), "PREFIX must be at most 32 letters"),
        (cached(TTL=0), "TTL must be a positive number of seconds, not 0"),
        (cached(TTL=0.5), "TTL must be 1 to"),
        (cached(TTL=90 * 24 * 3600), "TTL must be 1 to 1296000 seconds"),
        (cached(TTL=5), "TTL (5) must not be less than QUARANTINE (10.0)"),
        (cached(TIMEOUT=-1), "TIMEOUT must be a positive number"),
        (cached(TIMEOUT=3), "TIMEOUT (3) must be less than COMMIT_WITHIN (2.0)"),
        (cached(BACKOFF="1"), "BACKOFF must be a positive number"),
        (cached(COMMIT_WITHIN=True), "COMMIT_WITHIN must be a positive number"),
        (cached(QUARANTINE=4), "QUARANTINE (4) must be more than twice COMMIT_WITHIN (2.0)"),
        (cached(QUARANTINE=math.nan), "QUARANTINE must be a positive number"),
        (broken(ON_CACHE_FAILURE="ignore"), "ON_CACHE_FAILURE must be 'refuse' or 'proceed'"),
        (
            cached(ALSO_MARK="default"),
            "ALSO_MARK must be a list of aliases of CACHES, not 'default'",
        ),
        (cached(ALSO_MARK=[1]), "ALSO_MARK must be a list of aliases of CACHES, not [1]"),
        (broken(NODES=["a"]), "NODES must be a dict, not list"),
        (broken(NODE_DEFAULTS=["a"]), "NODE_DEFAULTS must be a dict, not list"),
        (broken(ADMIN=True), "ADMIN must be a dict, not bool"),
        (broken(GROUPS=["photos"]), "GROUPS must be a dict, not list"),
        (broken(GROUPS={1: GOOD["GROUPS"]["photos"]}), "group 1: its name must be text"),
        (broken(GROUPS={"photos_00001": {}}), "could be another group's shard"),
        (broken(GROUPS={"photos_template": {}}), "could be another group's shard"),
    ],
)
def test_what_is_wrong_is_named(raw: Any, expected: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        conf.parse(raw)
    assert isinstance(caught.value, ImproperlyConfigured)
    assert expected in str(caught.value)


def test_one_error_lists_all_that_is_wrong_and_no_password() -> None:
    raw = broken(NODE={}, GROUPS__photos__RANGES=[{"range": (1, 5), "primary": "z"}], TICKETS=3)
    with pytest.raises(InvalidConfiguration) as caught:
        conf.parse(raw)
    assert len(caught.value.problems) == 4
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        ({"MAXIMUM": 5}, "unknown key 'MAXIMUM'; valid keys are ['MAX', 'MAX_SCHEMAS', 'TIMEOUT']"),
        ({"MAX": 0}, "MAX must be a number from 1, not 0"),
        ({"MAX": True}, "MAX must be a number from 1, not True"),
        ({"MAX_SCHEMAS": "many"}, "MAX_SCHEMAS must be a number from 1, not 'many'"),
        ({"TIMEOUT": -1}, "TIMEOUT must be a positive number of seconds, not -1"),
    ],
)
def test_the_pool_of_a_node(pool: dict[str, Any], problem: str) -> None:
    node = {"ENGINE": "sharded_orm.backends.postgresql", "NAME": "site", "HOST": "one"}
    with pytest.raises(InvalidConfiguration) as caught:
        conf.parse(broken(NODES__a={**node, "POOL": pool}))
    assert f"node 'a': POOL: {problem}" in str(caught.value)
    conf.parse(broken(NODES__a={**node, "POOL": {"MAX": 5, "TIMEOUT": 2, "MAX_SCHEMAS": 50}}))
    with pytest.raises(InvalidConfiguration, match="unknown key 'MAX_SCHEMAS'"):
        conf.parse(broken(NODES__a__POOL={"MAX_SCHEMAS": 50}))


def test_a_node_given_as_a_url_is_not_shown() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        conf.parse(broken(NODES__a="mysql://user:s3cret@host"))
    assert "s3cret" not in str(caught.value)


def test_a_cache_given_as_a_url_is_not_shown() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        conf.parse(broken(CACHE="redis://:s3cret@host"))
    assert "s3cret" not in str(caught.value)
