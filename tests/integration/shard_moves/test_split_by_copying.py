"""Where no replica takes writes, a server is split by copying: shards go one by one, by one command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.imports.site import Done, site_on
from tests.integration.shard_moves.site import Site

SPLIT = ("shards", "split", "db1", "--to", "db2", "--shards", "accounts:0", "books:0-1")
_MOVES = "sharded_orm.operations.shard_moves"
MOMENTS = [
    f"{_MOVES}.record.ShardMoveRecord.enter:1",
    f"{_MOVES}.shard_mover.ShardMover._prepare:1",
    f"{_MOVES}.shard_mover.ShardMover._hide:1",
    f"{_MOVES}.record.ShardMoveRecord.publish:1",
    f"{_MOVES}.record.ShardMoveRecord.keep_until:1",
    # The second group.
    f"{_MOVES}.shard_mover.ShardMover._copy_the_rest:3",
]
MODELS = ("Account", "Order", "Book", "Review")


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_on(request.param, request, tmp_path, Site) as site:
        yield site


def split(site: Site, *arguments: str, code: int = 0, **environment: str) -> Done:
    return site.manage(*SPLIT, *arguments, code=code, **environment)


def places(site: Site) -> list[str]:
    return [site.place(0), site.place(1), site.place(0, "books"), site.place(1, "books")]


def test_shards_of_two_groups_go_over(site: Site) -> None:
    before = site.rows(*MODELS)
    checked = split(site, "--check", "--json").json
    assert [(m["group"], m["number"], m["source"], m["target"]) for m in checked["moves"]] == [
        ("accounts", 0, "db1", "db2"),
        ("books", 0, "db1", "db2"),
        ("books", 1, "db1", "db2"),
    ]
    assert places(site) == ["db1"] * 4
    reports = split(site, "--rate", "100000", "--json").json["groups"]
    assert [report["moved"] for report in reports] == [{"0": "db2"}, {"0": "db2", "1": "db2"}]
    assert all(report["rows"] for report in reports)
    assert places(site) == ["db2", "db1", "db2", "db2"]
    assert site.rows(*MODELS) == before
    # The old tables are there until the clean-up.
    assert "accounts_00000 db1" in site.left()
    done = site.manage("shards", "split", "db1", "--to", "db2", "--cleanup")
    assert "The old tables of shard 0 on 'db1' were deleted." in done.out
    assert site.left() == ""
    assert site.rows(*MODELS) == before
    # Nothing is left to do, and the command may run again.
    assert [r["moved"] for r in split(site, "--json").json["groups"]] == [{}, {}]
    assert "3 shards were there already." in split(site).out
    done = site.manage("shards", "split", "db1", "--to", "db2", "--cleanup")
    assert done.out.strip() == "Nothing is left to clean up."


@pytest.mark.parametrize(
    "moment",
    [
        # SQLite has one of them in the routine runs.
        pytest.param(moment, marks=[] if number == 2 else pytest.mark.long_on("sqlite"))
        for number, moment in enumerate(MOMENTS)
    ],
)
def test_the_same_command_goes_on_after_a_kill(site: Site, moment: str) -> None:
    before = site.rows(*MODELS)
    done = site.python("manage.py", *SPLIT, KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    split(site)
    assert places(site) == ["db2", "db1", "db2", "db2"]
    assert site.rows(*MODELS) == before
    site.manage("shards", "split", "db1", "--to", "db2", "--cleanup")
    assert site.left() == ""


@pytest.mark.long_on("sqlite")
def test_a_broken_split_is_not_cleaned_up(site: Site) -> None:
    before = site.rows(*MODELS)
    site.python("manage.py", *SPLIT, KILL_AT=MOMENTS[3])
    done = site.manage("shards", "split", "db1", "--to", "db2", "--cleanup", code=1)
    assert "shards move accounts --repair" in done.err
    site.move("accounts", "--repair")
    assert places(site) == ["db2", "db1", "db1", "db1"]
    assert site.rows(*MODELS) == before
    # The rest goes over.
    split(site)
    assert places(site) == ["db2", "db1", "db2", "db2"]


_DROP_TABLES = """
connection = connections["accounts_00000"]
with connection.cursor() as cursor:
    if connection.vendor == "sqlite":
        cursor.execute("PRAGMA foreign_keys = OFF")
    for name in connection.introspection.table_names(cursor):
        cascade = " CASCADE" if connection.vendor == "postgresql" else ""
        cursor.execute(f"DROP TABLE {connection.ops.quote_name(name)}{cascade}")
"""


@pytest.mark.long_on("sqlite")
def test_old_tables_stay_if_the_new_server_lacks_the_shard(site: Site) -> None:
    split(site)
    site.run(_DROP_TABLES)
    done = site.manage("shards", "split", "db1", "--to", "db2", "--cleanup", code=1)
    assert "'accounts_00000' has no tables on 'db2'" in done.err
    assert "accounts_00000 db1" in site.left()


def test_a_clean_up_without_a_split(site: Site) -> None:
    done = site.manage("shards", "split", "db2", "--to", "db3", "--cleanup", code=1)
    assert "there is no node 'db3'" in done.err
