"""The arguments and the environment of ``psql``."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("psycopg")

from sharded_orm.backends.postgresql.client import DatabaseClient
from sharded_orm.topology.aliases import complete


def environment(monkeypatch: pytest.MonkeyPatch, given: str = "", **settings: Any) -> Any:
    monkeypatch.setenv("PGOPTIONS", given)
    node = complete({"NAME": "site", "USER": "u", "PASSWORD": "p", **settings})
    arguments, variables = DatabaseClient.settings_to_cmd_args_env(node, ["-c", "SELECT 1"])
    assert arguments == ["psql", "-U", "u", "-c", "SELECT 1", "site"]
    return variables


def test_an_alias_without_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment(monkeypatch) == {"PGPASSWORD": "p"}


def test_the_shell_stands_in_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(monkeypatch, "-c work_mem=8MB", SCHEMA='my "own\\')
    assert variables["PGPASSWORD"] == "p"
    assert variables["PGOPTIONS"].startswith('-c work_mem=8MB -c search_path="my\\ ""own\\\\",\\ "')
