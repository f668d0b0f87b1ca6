"""``shards balance --apply``: the shards move, and the site has all rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.imports.site import BACKENDS, site_on
from tests.integration.shard_moves.site import Site

MODELS = ("Account", "Order")


@pytest.fixture(params=BACKENDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """All the load is on the two shards of ``db1``."""
    with site_on(request.param, request, tmp_path, Site) as site:
        load = {"accounts_00000": 10, "accounts_00001": 9}
        (site.folder / "load.json").write_text(json.dumps(load))
        yield site


def options(site: Site) -> tuple[str, ...]:
    return ("--group", "accounts", "--by", "load", "--load", str(site.folder / "load.json"))


def test_the_planned_shards_move(site: Site) -> None:
    before = site.rows(*MODELS)
    shown = site.manage("shards", "balance", *options(site)).out
    assert "To move the shards, add --apply." in shown
    (command,) = (line for line in shown.splitlines() if line.startswith("manage.py shards move"))
    number = int(command.split()[4])
    assert site.place(number) == "db1"
    done = site.manage("shards", "balance", *options(site), "--apply", "--keep", "0")
    assert "1 shards moved, 1 of 1 steps made; statements waited for" in done.out
    assert site.place(number) == "db2"
    assert site.place(1 - number) == "db1"
    assert site.rows(*MODELS) == before
    again = site.manage("shards", "balance", *options(site), "--apply")
    assert "1 shard stays, because it has moved a short time ago." in again.out
    assert "0 shards moved, 0 of 0 steps made." in again.out


def test_a_step_that_is_refused_is_named(site: Site) -> None:
    """Somebody else's tables are where the shard would go."""
    site.run("""
from sharded_orm import runtime
from dataclasses import replace
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
for number in (0, 1):
    with SchemaSessions(replace(runtime.shard("accounts", number), node="db2"), print) as sessions:
        sessions.wrapper.create_shard_database()
        with sessions.wrapper.cursor() as cursor:
            cursor.execute("CREATE TABLE precious (id INT PRIMARY KEY)")
""")
    done = site.manage("shards", "balance", *options(site), "--apply", "--json", code=1)
    (report,) = done.json["reports"]
    assert report["moved"] == {}
    assert "precious" in done.err
    assert [site.place(number) for number in (0, 1)] == ["db1", "db1"]


def test_pinned_shards_that_an_operator_moves_stay_pinned_and_joined(site: Site) -> None:
    document = site.manage("topology", "pull").json
    document["groups"]["accounts"]["RANGES"][0]["pinned"] = True
    file = site.folder / "pinned.json"
    file.write_text(json.dumps({**document, "version": document["version"] + 1}))
    site.manage("topology", "push", str(file))
    shown = site.manage("shards", "balance", *options(site)).out
    assert "There is nothing to move." in shown
    site.move("accounts", "0", "--to", "db2")
    site.move("accounts", "0", "--to", "db1")
    after = site.manage("topology", "pull").json
    assert after["groups"] == document["groups"]
