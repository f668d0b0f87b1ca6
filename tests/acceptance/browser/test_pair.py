"""The map of shards on a pair of servers, while the pair gets the schema of the site's next release."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium import webdriver

from tests.acceptance.browser.admin import MAP
from tests.acceptance.browser.chrome import Browser
from tests.acceptance.browser.conftest import ARTIFACTS
from tests.acceptance.browser.site import Site, log_in, serving
from tests.acceptance.project import Project
from tests.conftest import service_missing
from tests.services import ServiceMissing
from tests.services.demo_pair import demo_pair
from tests.services.replication import MasterPair, execute_alone

pytestmark = pytest.mark.long

#: Pair, side, active shards, seconds behind the other side, passive shards.
COLUMNS = 5
BOTH = "node_1 and node_2"


@dataclass(frozen=True)
class PairSite:
    """The demo on a pair, and the browser of its superuser."""

    pair: MasterPair
    folder: Path
    browser: Browser

    def next_release(self, *arguments: str) -> None:
        """Run ``manage.py`` of the next release."""
        program = self.folder / "next_release" / "manage"
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def rows(self) -> list[list[str]]:
        """Open the map. Return the cells of the table of pairs."""
        self.browser.open(MAP)
        cells = self.browser.texts(".fleet-table tbody th, .fleet-table tbody td")
        return [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]


@pytest.fixture
def site(chrome: webdriver.Chrome, tmp_path: Path) -> Iterator[PairSite]:
    try:
        with (
            demo_pair(tmp_path) as (pair, variables),
            (tmp_path / "server.log").open("w", buffering=1, encoding="utf-8") as log,
        ):
            project = Project("mariadb", tmp_path, variables)
            with serving(project, log) as (address, user, password):
                browser = Browser(chrome, address, ARTIFACTS / "browser" / "pair")
                site = Site("mariadb", address, user, password, project, pair.second)
                browser.open("/admin/")
                log_in(browser, site)
                yield PairSite(pair, tmp_path, browser)
    except ServiceMissing as exc:
        service_missing(exc)


def test_a_rolling_upgrade_on_the_map(site: PairSite) -> None:
    refuse = "refuse writes"
    assert site.rows() == [
        [BOTH, "node_1", "19", "0 s", refuse],
        [BOTH, "node_2", "19", "0 s", refuse],
    ]
    assert site.browser.texts(".fleet-problems li") == []
    site.browser.picture("before")

    site.next_release("migrate_shards", "--rolling", "--until", "migrate-passive")
    rows = site.rows()
    assert [row[3] for row in rows] == ["0 s", "keeps rows for later"]
    (problem,) = site.browser.texts(".fleet-problems li")
    assert "goes on with its step 'compare'" in problem
    site.browser.picture("migrate-passive")

    site.next_release("migrate_shards", "--rolling", "--until", "switch")
    assert [row[2] for row in site.rows()] == ["0", "38"]
    site.browser.picture("switch")

    site.next_release("migrate_shards", "--rolling")
    assert [row[2:] for row in site.rows()] == [["19", "0 s", refuse]] * 2

    execute_alone(site.pair.first, "CREATE TABLE demo_photos_00000.made_by_hand (id INT)")
    assert [row[4] for row in site.rows()] == ["1 accept writes", refuse]
    (problem,) = site.browser.texts(".fleet-problems li")
    assert "The passive side of photos_00000 accepts writes" in problem
    site.browser.picture("writable")
