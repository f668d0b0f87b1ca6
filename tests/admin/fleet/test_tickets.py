"""The page of the ticket servers."""

from __future__ import annotations

from pathlib import Path

from tests.admin.fleet.site import TICKETS, Site, serving
from tests.integration.shards.conftest import Fleet

CREATE = "from django.core.management import call_command; call_command('tickets', 'create')"


def test_both_servers_and_what_is_wrong(site: Site, fleet: Fleet) -> None:
    before = site.get(TICKETS)
    assert "run 'manage.py tickets create'" in before.text  # Before the sequences are created.
    site.run(CREATE)
    site.run("from sharded_orm import runtime; runtime.tickets().take('photos', 5)")
    page = site.get(TICKETS)
    assert "tickets_1 State answers Gives 1, then every 2 more" in page.text
    assert "tickets_2 State answers Gives 2, then every 2 more" in page.text
    assert "What is wrong" not in page.text
    drift = site.run(
        "from sharded_orm.operations import tickets; result = tickets.status().drift['photos']"
    )
    assert drift > 0
    assert f"less than 0.1 % used {drift} " in page.text + " "


def test_a_server_that_is_down(site: Site, fleet: Fleet) -> None:
    site.run(CREATE)
    site.run("from sharded_orm import runtime; runtime.reset()")
    path, hidden = fleet.folder / "tickets_2.sqlite3", fleet.folder / "kept"
    path.rename(hidden)
    path.mkdir()
    try:
        page = site.get(TICKETS)
        assert page.status == 200
        assert page.seconds < 6
        assert "tickets_2 State down" in page.text
        assert "'tickets_2' does not answer" in page.text
        assert "photos" in page.text
    finally:
        path.rmdir()
        hidden.rename(path)
        site.run("from sharded_orm import runtime; runtime.reset()")


def test_without_servers(sqlite_template: Path, fleet: Fleet) -> None:
    with serving(fleet, FLEET_SETTING='{"TICKETS": []}') as site:
        assert "No ticket server is configured" in site.get(TICKETS).text
