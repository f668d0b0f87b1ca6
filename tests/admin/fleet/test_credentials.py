"""No page shows the name or the password of a database account."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.admin.fleet.site import ADMIN, MAP, TOPOLOGY, Site, serving
from tests.integration.shards.conftest import Fleet

SECRETS = [
    "recognisable-user",
    "recognisable-password",
    "recognisable-operator",
    "recognisable-new",
]
CHANGE = """
from sharded_orm.operations import topology
def edit(document):
    content = document.content()
    content["nodes"] = {"one": {"PASSWORD": "recognisable-new", "TIME_ZONE": "UTC"}}
    return type(document).from_content(content)
topology.change(edit, "a password for 'recognisable-user'")
"""


def pages(site: Site, first: str) -> dict[str, str]:
    """All pages that can be reached by links from ``first``."""
    bodies: dict[str, str] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop()
        if path in bodies:
            continue
        page = site.get(path)
        assert page.status in (200, 302), f"{page.status} {path}"
        bodies[path] = page.body + " ".join(page.messages)
        links = [page.location, *page.links] if page.location else page.links
        within, _, _ = path.partition("?")
        links = [within + link if link.startswith("?") else link for link in links]
        waiting += [link for link in links if link.startswith(ADMIN)]
    return bodies


# Texts that a promotion and a migration have written into the journal.
JOURNAL = """
from sharded_orm.models import OperationRun, OperationStep
run = OperationRun.objects.create(
    kind="promote", subject="fleet", state="refused",
    arguments={"node": "one", "warnings": [
        "the application's account 'recognisable-user' of node 'one' may write",
        "view: CREATE DEFINER=`recognisable-user`@`%`",
    ]},
    error="node 'one' refuses the OPERATOR account 'recognisable-operator': 1045: Access"
    " denied for user 'recognisable-operator'@'h'",
)
for number, error in enumerate([
    "1226: User 'recognisable-user' has exceeded the 'max_user_connections' resource",
    "1203: User recognisable-user already has more than 'max_user_connections' active connections",
]):
    OperationStep.objects.create(
        run=run, alias=f"photos_{number:05d}", state="failed", error=error
    )
result = run.pk
"""


@pytest.mark.parametrize("writable", [True, False])
def test_no_page_shows_a_credential(sqlite_template: Path, tmp_path: Path, writable: bool) -> None:
    fleet = Fleet(tmp_path / "fleet")
    shutil.copytree(sqlite_template, fleet.folder)
    nodes = {
        name: {
            "ENGINE": "sharded_orm.backends.sqlite3",
            "NAME": str(fleet.folder / name),
            "USER": "recognisable-user",
            "PASSWORD": "recognisable-password",
            "OPERATOR": {"USER": "recognisable-operator", "PASSWORD": "recognisable-operator"},
        }
        for name in ("one", "two")
    }
    environment = {"FLEET_NODES": json.dumps(nodes)}
    if writable:
        environment |= {"FLEET_TOPOLOGY": str(tmp_path / "map.json"), "FLEET_CREDENTIALS": "1"}
    with serving(fleet, **environment) as site:
        if writable:
            site.run(CHANGE)
        written = site.run(JOURNAL)
        bodies = pages(site, f"{ADMIN}/shardmap/")
        answers = [
            site.post(f"{MAP}range/photos/4-7/set/", do="open"),
            site.post(f"{TOPOLOGY}1/rollback/"),
            site.post(f"{MAP}range/nothing/4-7/set/", do="open"),
        ]
        texts = [*bodies.values(), *(answer.body for answer in answers)]
        assert not [secret for secret in SECRETS for body in texts if secret in body]
        # The links have led to all kinds of pages.
        for path in ("shard/visits_00001/", "find/", "range/photos/0-3/"):
            assert MAP + path in bodies
        assert f"{ADMIN}/operationrun/1/change/" in bodies
        run = site.get(f"{ADMIN}/operationrun/{written}/change/").text
        assert "node 'one' refuses the OPERATOR account: 1045" in run
        assert "the application's account of node 'one' may write" in run
        assert "this account has exceeded" in run and "this account already has more" in run
        if writable:
            differences = site.get(f"{TOPOLOGY}diff/?from=1&to=2").text
            assert "PASSWORD changes" in differences
