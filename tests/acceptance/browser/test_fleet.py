"""The fleet pages: the map, a shard, tickets, operations, the topology."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import STDOUT

import pytest
from selenium.webdriver.common.by import By

from tests.acceptance.browser.admin import HERE, LINK, MAP, PHOTOS, SHARD, key_of_first
from tests.acceptance.browser.chrome import Browser
from tests.acceptance.browser.site import Site
from tests.acceptance.project import ROOT
from tests.python_process import PythonProcess

# The pages look alike on each backend. Those of a node that is down are in test_outage.
pytestmark = pytest.mark.long_on("mariadb")


def test_map(browser: Browser) -> None:
    browser.open("/admin/")
    browser.follow("#content .model-shardmap th a")
    assert browser.path == MAP
    nodes = browser.all(".fleet-node")
    assert [node.find_element(By.TAG_NAME, "h2").text for node in nodes] == ["node_1", "node_2"]
    assert browser.texts(".fleet-node header .fleet-state") == ["answers"] * 2
    assert len(browser.all(".fleet-map .cell.current rect")) == 38
    browser.picture("map")
    browser.follow(".fleet-choice a", "photos")
    assert len(browser.all(".fleet-map .cell rect")) == 16
    browser.follow(".fleet-choice a", "rows")
    browser.picture("rows")


def test_a_shard(browser: Browser) -> None:
    browser.open(PHOTOS)
    alias = browser.texts(SHARD)[0]
    browser.open(MAP)
    with browser.next_page():
        browser.one(f".fleet-map a[href$='/{alias}/'] rect").click()
    assert browser.one("h1").text == alias
    assert "current" in browser.texts(".fleet-state")
    assert "photos_photo" in browser.text
    browser.picture("shard")
    browser.follow("td a, th a", "Photos")
    assert alias in browser.one(HERE).text
    assert browser.all(LINK)


def test_fleet_on_a_phone(browser: Browser) -> None:
    with browser.phone():
        for name, link in {"map": "", "tickets": "Tickets", "topology": "Topology"}.items():
            browser.open(MAP)
            if link:
                browser.follow(".fleet-pages a", link)
            browser.picture(name)
            assert browser.too_wide() <= 0, name
        browser.open(MAP)
        browser.follow(".fleet-range figcaption a")
        browser.picture("range")
        assert browser.too_wide() <= 0


def test_find_a_key(browser: Browser) -> None:
    browser.open(PHOTOS)
    key, alias = key_of_first(browser), browser.texts(SHARD)[0]
    browser.open(MAP)
    browser.follow(".fleet-find")
    browser.choose("by", "photos.Photo: owner_id")
    browser.fill(value=key)
    browser.follow(".fleet-form [type=submit]")
    assert alias in browser.one(".fleet-card").text
    browser.picture("found")
    browser.follow(".fleet-card a", alias)
    assert browser.one("h1").text == alias


def test_range_of_settings_is_changed_by_hand(browser: Browser) -> None:
    browser.open(MAP)
    browser.follow(".fleet-range figcaption a", "photos 0-7")
    assert len(browser.all(".fleet-table tbody tr")) == 8
    browser.picture("range")
    browser.follow(".fleet-actions [value^='Close']")
    assert "Nothing was changed" in browser.text
    browser.picture("by-hand")
    browser.follow(".fleet-back")
    assert "open" in browser.one(".fleet-card").text


def test_tickets(browser: Browser) -> None:
    browser.open(MAP)
    browser.follow(".fleet-pages a", "Tickets")
    assert browser.texts(".fleet-card h2") == ["tickets_1", "tickets_2"]
    assert browser.texts(".fleet-card .fleet-state") == ["answers"] * 2
    assert any(row.startswith("photos_photo ") for row in browser.texts(".fleet-table tbody tr"))
    browser.picture("tickets")


def test_operations(browser: Browser) -> None:
    browser.open(MAP)
    browser.follow(".fleet-pages a", "Operations")
    runs = browser.texts(".fleet-table tbody th")
    assert [run.partition(",")[0] for run in runs[-2:]] == ["migrate ratings", "migrate photos"]
    browser.picture("operations")
    browser.follow(".fleet-table tbody th a", "photos")
    assert "16 of 16" in browser.text
    browser.picture("run")


@contextmanager
def run_that_waits(site: Site) -> Iterator[PythonProcess]:
    """A run that pauses after its first shard. After the block all shards are as before."""
    command = [str(ROOT / "manage.py"), "migrate_shards", "movielens", "zero", "--verbosity", "0"]
    with PythonProcess(
        [*command, "--fake", "--group", "ratings", "--pause", "600"],
        cwd=ROOT,
        env=site.project.environment,
        stderr=STDOUT,
    ) as run:
        try:
            yield run
        finally:
            run.terminate()
    site.project.manage("migrate_shards", "--fake", "--group", "ratings")


def test_run_as_it_goes_on(browser: Browser, site: Site) -> None:
    with run_that_waits(site) as run:

        def has_begun() -> bool:
            browser.open("/admin/sharded_orm/operationrun/")
            return browser.texts(".fleet-table tbody tr:first-child .fleet-state") == ["running"]

        browser.wait(has_begun, "a run")
        browser.follow(".fleet-table tbody th a")
        browser.wait(lambda: browser.texts("[data-fleet=ended]") == ["1"], "its first shard")
        assert browser.one("[data-fleet=state]").text == "running"
        browser.picture("running")
        with browser.next_page():
            run.send_signal(signal.SIGTERM)
        assert browser.one("[data-fleet=state]").text == "stopped"
        assert "migrate_shards" in browser.one(".fleet-command").text
        browser.picture("stopped")


def test_topology(browser: Browser) -> None:
    browser.open(MAP)
    browser.follow(".fleet-pages a", "Topology")
    assert "SHARDED_ORM in the settings" in browser.text
    browser.picture("topology")
