"""The check of nodes reports settings that the driver refuses, and asks no server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sharded_orm import runtime
from sharded_orm.checks.nodes import check_nodes

DRIVERS = {"mysql": "MySQLdb", "postgresql": "psycopg", "sqlite3": "sqlite3"}


def problems(engine: str, options: dict[str, Any]) -> list[str]:
    pytest.importorskip(DRIVERS[engine])
    node = {"ENGINE": f"sharded_orm.backends.{engine}", "OPTIONS": options, "PASSWORD": "s3cret"}
    if engine != "sqlite3":
        # Nothing is resolved: the name is never looked up.
        node |= {"HOST": "db.invalid", "PORT": 7777}
    if engine != "mysql":
        node["NAME"] = "shards"
    swapped = runtime._topology  # of a test run with databases
    runtime.swap(replace(runtime.topology(), nodes={"one": node}))
    try:
        messages = check_nodes()
    finally:
        runtime.swap(swapped)
    assert all(message.id == "sharded_orm.E076" and message.hint for message in messages)
    return [str(message.msg) for message in messages]


@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        ("mysql", {"conect_timeout": 5}, "'conect_timeout'"),
        ("mysql", {"connect_timeout": "5"}, "'str' object"),
        ("mysql", {"isolation_level": "sometimes"}, "'sometimes'"),
        ("mysql", {"ssl_mode": "MAYBE"}, "ssl_mode"),
        ("postgresql", {"conect_timeout": 5, "sslmod": "require"}, "'conect_timeout', 'sslmod'"),
        ("postgresql", {"pool": True}, "'pool'"),
        ("sqlite3", {"timout": 5}, "'timout'"),
        ("sqlite3", {"transaction_mode": "SOMETIMES"}, "'SOMETIMES'"),
    ],
)
def test_an_option_that_the_driver_refuses_is_named(
    engine: str, options: dict[str, Any], named: str
) -> None:
    (problem,) = problems(engine, options)
    assert problem.startswith("Node 'one' ")
    assert named in problem
    assert "s3cret" not in problem


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (
            "mysql",
            {
                "charset": "utf8mb4", "collation": "utf8mb4_bin", "connect_timeout": 5,
                "init_command": "SET @x = 1", "isolation_level": "repeatable read",
                "read_default_file": "/nowhere/my.cnf", "sql_mode": "ANSI", "ssl": {"ca": "/nowhere"},
            },
        ),
        (
            "postgresql",
            {
                "application_name": "shop", "assume_role": "shop", "connect_timeout": 5,
                "context": None, "isolation_level": 2, "options": "-c lock_timeout=5s",
                "pool": False, "prepare_threshold": None, "service": "shop", "sslmode": "require",
                "target_session_attrs": "read-write",
            },
        ),
        ("sqlite3", {"timeout": 5, "transaction_mode": "IMMEDIATE", "init_command": "PRAGMA x"}),
    ],
)  # fmt: skip
def test_options_of_driver_and_django_are_accepted(engine: str, options: dict[str, Any]) -> None:
    assert problems(engine, options) == []
