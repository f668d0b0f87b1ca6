"""Topology documents: reading, merging with the settings, and refused content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_orm import conf
from sharded_orm.active_config import _checked
from sharded_orm.exceptions import InvalidConfiguration, InvalidTopology
from sharded_orm.routing.base import BUILT_IN
from sharded_orm.topology.document import Document

GROUPS = {"photos": {"RANGES": [{"range": [0, 511], "primary": "db1"}]}}
DOCUMENT = Document(7, {"db1": {"HOST": "one"}}, GROUPS)
SETTING: dict[str, Any] = {
    "NODES": {"db1": {"USER": "app", "PASSWORD": "s3cret", "OPTIONS": {"charset": "utf8mb4"}}},
    "NODE_DEFAULTS": {"ENGINE": "sharded_orm.backends.mysql", "CONN_MAX_AGE": 60},
    "GROUPS": {"photos": {"STRATEGY": "modulo"}},
    "TOPOLOGY": {"SOURCE": "zookeeper"},
}


def test_a_document_is_what_was_written() -> None:
    assert Document.from_json(DOCUMENT.to_json()) == DOCUMENT
    assert Document.from_content(DOCUMENT.content()) == DOCUMENT


@given(st.binary() | st.text())
def test_what_is_no_document_is_an_error_of_ours(raw: bytes | str) -> None:
    with pytest.raises(InvalidTopology):
        Document.from_json(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_neither_is_other_json(value: Any) -> None:
    with pytest.raises(InvalidTopology):
        Document.from_json(json.dumps(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": 1, "version": 1, "version": 2}', "key 'version' stands twice"),
        ('{"format": 1, "version": NaN}', "NaN is no number"),
        ('{"format": true, "version": 1}', "format must be 1, not True"),
        ('{"format": 1, "version": -1}', "version must be a number that counts up, not -1"),
        ('{"format": 1, "version": true}', "version must be"),
        ('{"format": 1, "version": 1, "node": {}}', "unknown key 'node'; valid keys are"),
        ('{"format": 1, "version": 1, "nodes": []}', "nodes must be an object, not list"),
        ('{"format": 1, "version": 1, "groups": {"a": 3}}', "group 'a' must be an object, not int"),
        ("[" * 100_000, "it is not JSON"),
        (
            '{"format": 1, "version": 1, "nodes": {"a": {"b": ' + "[" * 40 + "]" * 40 + "}}}",
            "it is nested more than 32 deep",
        ),
        ('{"\\ud800": 1}', "it holds text that UTF-8 cannot encode, at '\\ud800'"),
        (
            '{"format": 1, "version": 1, "nodes": {"\\ud800": {}}}',
            "it holds text that UTF-8 cannot encode, at nodes['\\ud800']",
        ),
        (
            '{"format": 1, "version": 1, "nodes": {"a": {"OPTIONS": {"b": [0, 1e999]}}}}',
            "it holds inf, which is no number in JSON, at nodes['a']['OPTIONS']['b'][1]",
        ),
    ],
)
def test_problems_are_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidTopology, match="The topology document has 1 problem") as caught:
        Document.from_json(text)
    assert problem in str(caught.value)


def test_no_problem_shows_a_credential() -> None:
    text = '{"format": 1, "version": 1, "nodes": {"a": {"PASSWORD": "s3cret\\ud800"}}}'
    with pytest.raises(InvalidTopology, match="cannot encode, at nodes") as caught:
        Document.from_json(text)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("number", ["inf", "nan"])
def test_toml_has_numbers_that_json_has_not(tmp_path: Path, number: str) -> None:
    """A copy of it could not be read again."""
    path = tmp_path / "topology.toml"
    path.write_text(f"format = 1\nversion = 7\n[nodes.db1.OPTIONS]\ntimeout = {number}\n")
    with pytest.raises(InvalidTopology, match=f"it holds {number}, which is no number in JSON"):
        Document.from_file(path)


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(
        "format = 1\nversion = 7\n"
        '[nodes.db1]\nHOST = "one"\n'
        '[[groups.photos.RANGES]]\nrange = [0, 511]\nprimary = "db1"\n'
    )
    assert Document.from_file(path) == DOCUMENT
    path.write_text("version = ")
    with pytest.raises(InvalidTopology, match="it is not TOML"):
        Document.from_file(path)


def test_it_is_laid_over_the_settings() -> None:
    topology = conf.parse(SETTING, DOCUMENT).topology
    assert topology.version == 7
    assert topology.groups["photos"].count == 512
    assert topology.nodes["db1"] == {
        "ENGINE": "sharded_orm.backends.mysql", "CONN_MAX_AGE": 60, "USER": "app",
        "PASSWORD": "s3cret", "OPTIONS": {"charset": "utf8mb4"}, "HOST": "one",
    }  # fmt: skip
    more = Document(8, {"db1": {"OPTIONS": {"connect_timeout": 2}}, "db2": {"HOST": "two"}}, GROUPS)
    topology = conf.parse(SETTING, more).topology
    assert topology.nodes["db1"]["OPTIONS"] == {"charset": "utf8mb4", "connect_timeout": 2}
    assert topology.nodes["db2"]["ENGINE"] == "sharded_orm.backends.mysql"


def test_ranges_that_would_be_ignored_are_refused() -> None:
    both = {**SETTING, "GROUPS": {"photos": {"STRATEGY": "modulo", **GROUPS["photos"]}}}
    with pytest.raises(InvalidConfiguration, match="RANGES of the settings would be ignored"):
        conf.parse(both, DOCUMENT)


@pytest.mark.parametrize(
    ("node", "where"),
    [
        ({"USER": "x"}, "USER"),
        ({"PASSWORD": "x"}, "PASSWORD"),
        ({"OPERATOR": {"USER": "x"}}, "OPERATOR"),
        ({"OPTIONS": {"passwd": "x"}}, "OPTIONS['passwd']"),
        ({"OPTIONS": {"ssl": {"key_password": "x"}}}, "OPTIONS['ssl']['key_password']"),
        ({"OPTIONS": {"auth_token": "x"}}, "OPTIONS['auth_token']"),
    ],
)
def test_credentials_are_found_and_never_shown(node: dict[str, Any], where: str) -> None:
    document = Document(1, {"db1": {"HOST": "one", **node}}, {})
    (problem,) = document.credentials()
    assert f"node 'db1': {where} does not belong" in problem
    assert document.without_credentials().credentials() == []
    assert document.without_credentials().nodes["db1"]["HOST"] == "one"
    empty = Document(1, {"db1": {"HOST": "one"}}, {})
    (changes,) = empty.differences(document)
    assert "x" not in changes.replace("OPTIONS", "")
    assert "'x'" not in repr(document)


def test_settings_that_json_cannot_hold_stay_in_the_settings(tmp_path: Path) -> None:
    nodes = {"a": {"NAME": tmp_path, "OPTIONS": {"conv": {int: str}, "factory": object}}}
    public = Document(0, nodes, {}).without_credentials()
    assert Document.from_json(public.to_json()).nodes == {
        "a": {"NAME": str(tmp_path), "OPTIONS": {"conv": {}}}
    }


def test_differences_are_sentences() -> None:
    content = DOCUMENT.content()
    assert DOCUMENT.differences(Document.from_content(content)) == []
    content["nodes"]["db1"]["HOST"] = "other"
    content["nodes"]["db2"] = {"HOST": "two"}
    entry = content["groups"]["photos"]["RANGES"][0]
    entry.update(primary="db2", replica="db1")
    content["groups"]["photos"]["RANGES"].append({"range": [512, 1023], "primary": "db2"})
    content["groups"]["visits"] = {}
    assert DOCUMENT.differences(Document.from_content(content)) == [
        "node 'db1': HOST 'one' becomes 'other'",
        "node 'db2': new",
        "node 'db2': HOST is 'two'",
        "group 'photos': range [0, 511]: primary 'db1' becomes 'db2'",
        "group 'photos': range [0, 511] gets the replica 'db1'",
        "group 'photos': range [512, 1023] is new: primary 'db2'",
        "group 'visits': new",
    ]


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({}, {"weight": 5}, "weight 1 (the default) becomes 5"),
        ({"weight": 0.5}, {}, "weight 0.5 becomes 1 (the default)"),
        ({"weight": 0.5}, {"weight": 1.0}, "weight 0.5 becomes 1 (the default)"),
        ({}, {"open": False}, "open True (the default) becomes False"),
        ({}, {"pinned": True}, "pinned False (the default) becomes True"),
        ({"open": False}, {"open": True}, "open False becomes True (the default)"),
        ({"weight": 2.0}, {"weight": 3}, "weight 2 becomes 3"),
        ({"open": False}, {}, "open False becomes True (the default)"),
        ({"replica": "db2"}, {"replica": "db3"}, "replica 'db2' becomes 'db3'"),
        ({}, {"wieght": 5}, "wieght is 5"),
        ({"wieght": None}, {}, "wieght None goes"),
    ],
)
def test_what_changes_in_a_range_is_said_with_its_default(
    before: dict[str, Any], after: dict[str, Any], difference: str
) -> None:
    old, new = (
        Document(1, {}, {"photos": {"RANGES": [{"range": [0, 3], "primary": "a", **more}]}})
        for more in (before, after)
    )
    assert old.differences(new) == [f"group 'photos': range [0, 3]: {difference}"]
    assert not old.same_content(new)


def test_a_range_gets_and_loses_its_replica() -> None:
    without, with_one = (
        Document(1, {}, {"photos": {"RANGES": [{"range": [0, 3], "primary": "a", **more}]}})
        for more in ({}, {"replica": "b"})
    )
    assert without.differences(with_one) == ["group 'photos': range [0, 3] gets the replica 'b'"]
    assert with_one.differences(without) == ["group 'photos': range [0, 3] loses the replica 'b'"]


def ranges(*entries: Any) -> Document:
    return Document(1, {}, {"photos": {"RANGES": list(entries)}})


FIRST, SECOND = {"range": [0, 3], "primary": "a"}, {"range": [4, 7], "primary": "a"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # A default may be written out or not, and the order does not matter.
        (ranges(FIRST), ranges({**FIRST, "open": True, "weight": 1.0, "replica": None}), True),
        (ranges(FIRST, SECOND), ranges(SECOND, FIRST), True),
        (ranges(FIRST), ranges({**FIRST, "range": (0, 3)}), True),
        (Document(1, {}, {}), Document(9, {}, {}), True),
        (ranges(FIRST), ranges(FIRST, FIRST), False),
        (ranges(FIRST), ranges(FIRST, 5), False),
        (ranges(FIRST), Document(1, {}, {"photos": {"RANGES": 5}}), False),
        (Document(1, {}, {"photos": {}}), ranges(), False),
        (Document(1, {}, {}), Document(1, {}, {"photos": {}}), False),
        # None replaces the value of the settings.
        (Document(1, {"a": {}}, {}), Document(1, {"a": {"HOST": None}}, {}), False),
        (Document(1, {"a": {"OPTIONS": {}}}, {}), Document(1, {"a": {}}, {}), False),
    ],
)
def test_the_same_content_is_what_has_no_difference(
    one: Document, other: Document, same: bool
) -> None:
    assert (one.same_content(other), other.same_content(one)) == (same, same)
    assert (one.differences(other) == [], other.differences(one) == []) == (same, same)


def test_the_account_of_operators() -> None:
    setting = {**SETTING, "NODE_DEFAULTS": {**SETTING["NODE_DEFAULTS"], "OPERATOR": {"USER": "op"}}}
    assert conf.parse(setting, DOCUMENT).topology.nodes["db1"]["OPERATOR"] == {"USER": "op"}
    setting["NODE_DEFAULTS"]["OPERATOR"] = {"HOST": "x"}
    with pytest.raises(InvalidConfiguration, match="node 'db1': OPERATOR: unknown key 'HOST'"):
        conf.parse(setting, DOCUMENT)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("zookeeper://u:p@h", "TOPOLOGY must be a dict, not str"),
        ({"SOURCE": 3}, "SOURCE must be 'static'"),
        ({"OPTIONS": []}, "OPTIONS must be a dict, not list"),
        ({"HOSTS": "x"}, "TOPOLOGY: unknown key 'HOSTS'; valid keys are ['OPTIONS', 'SOURCE']"),
    ],
)
def test_a_source_that_is_set_wrongly(given: Any, problem: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        conf.source({"TOPOLOGY": given})
    assert problem in str(caught.value)
    assert "u:p" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.text(max_size=3) | st.just("db1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
RANGE = st.fixed_dictionaries(
    {},
    optional={
        "range": st.lists(st.integers(-1, 9) | JSON, max_size=3),
        **dict.fromkeys(("primary", "replica", "open", "weight"), JSON),
    },
)
SOUND = st.just({"range": [0, 3], "primary": "db1"})
GROUP = st.fixed_dictionaries(
    {},
    optional={
        "RANGES": st.tuples(SOUND) | st.lists(RANGE | SOUND | JSON, max_size=3) | JSON,
        "STRATEGY": st.sampled_from([*BUILT_IN]) | JSON,
        "STRATEGY_OPTIONS": st.dictionaries(
            st.sampled_from(["SIZE", "BOUNDS", "SHIFT", "BITS", "CACHE_SIZE"]), JSON
        )
        | JSON,
        "DATABASE_NAME": st.sampled_from(["{shard}", "{shard[0]}", "{", "{0}", "{shard:q}"]) | JSON,
        "ATOMIC_REQUESTS": JSON,
    },
)
NODE = st.dictionaries(
    st.sampled_from(["ENGINE", "NAME", "HOST", "OPTIONS", "TEST", "OPERATOR", "POOL"]), JSON
)


def problems_of(document: Document) -> tuple[str, ...]:
    try:
        _checked(document, None)
    except InvalidTopology as exc:
        return exc.problems
    return ()


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(["db1", "db2"]) | st.text(max_size=3), NODE, max_size=2),
    st.dictionaries(st.sampled_from(["photos"]) | st.text(max_size=3), GROUP, max_size=2),
)
def test_whatever_a_document_holds_it_is_used_or_named(nodes: Any, groups: Any) -> None:
    # It comes from anybody who may write to the source; a process must survive it.
    document = Document.from_json(Document(8, nodes, groups).to_json())
    with patch.object(conf, "read", return_value=SETTING):
        found = problems_of(document)
    assert not any("it cannot be used" in problem for problem in found)
    # It need not be sound to be compared.
    for other in (DOCUMENT, document):
        same = document.same_content(other)
        assert (document.differences(other) == []) is same
        assert (other.differences(document) == []) is same
