"""Operations that were broken off are named with a command that ends them."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from django.core.management import CommandError, load_command_class

from sharded_orm.models.tables.journal import OperationRun
from sharded_orm.operations.runs.conflicts import broken_off
from tests.queries.conftest import DATABASES

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

RUNS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("migrate", "photos", {}, ["migrate_shards"]),
    ("promote", "primaries", {"node": "n1"}, ["shards promote n1"]),
    ("promote", "primaries", {"node": "n1", "force": True}, ["shards promote n1 --force"]),
    ("move keys", "photos", {}, ["keys repair photos"]),
    ("move shards", "photos", {}, ["shards move photos --repair"]),
    ("grow", "photos", {"count": 2}, ["shards grow photos …", "shards grow photos --abort"]),
    ("switch sides", "photos", {}, ["shards switch photos --repair"]),
    ("rejoin", "primaries", {"node": "n1"}, ["pairs rejoin n1"]),
]


def start(kind: str, subject: str, arguments: dict[str, Any]) -> None:
    """Store a run of a process that has ended."""
    OperationRun.objects.create(
        kind=kind, subject=subject, arguments=arguments, unfinished=True,
        user="u", host="h", machine="m", pid=1, token="",
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "subject", "arguments", "commands"), RUNS)
def test_the_remedy_is_a_command_that_runs(
    kind: str, subject: str, arguments: dict[str, Any], commands: list[str]
) -> None:
    start(kind, subject, arguments)
    [problem] = broken_off({"photos"})
    assert re.findall("'manage.py (.+?)'", problem) == commands
    for command in commands:
        name, *words = shlex.split(command)
        if "…" not in words:
            parser = load_command_class("sharded_orm", name).create_parser("manage.py", name)
            try:
                parser.parse_args(words)
            except CommandError as exc:
                pytest.fail(f"{command}: {exc}")


def test_the_runs_are_read_by_one_query(django_assert_num_queries: Any) -> None:
    for kind, subject, arguments, _ in RUNS:
        if "force" not in arguments:
            start(kind, subject, arguments)
    with django_assert_num_queries(1):
        assert len(broken_off()) == len(RUNS) - 1


@pytest.mark.parametrize("kind", ["rolling", "import", "import check", "import follow"])
def test_what_may_rest_is_left_out(kind: str) -> None:
    start(kind, "photos", {})
    assert broken_off() == []
