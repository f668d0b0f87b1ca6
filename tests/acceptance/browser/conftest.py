"""One site and one browser per backend, for all tests of this folder.

Screenshots are saved in ``test-artifacts/browser/BACKEND/TEST/``, or below
``$SHARDED_ORM_TEST_ARTIFACTS``. For a test that fails, the page and the server's output are saved, too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.acceptance.browser.chrome import Browser, chromium
from tests.acceptance.browser.site import Site, log_in, site_on
from tests.acceptance.project import BACKENDS, ROOT
from tests.conftest import service_missing
from tests.services import ServiceMissing

ARTIFACTS = Path(os.environ.get("SHARDED_ORM_TEST_ARTIFACTS") or ROOT / "test-artifacts")

failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[failed] = item.stash.get(failed, False) or report.failed
    return report


@pytest.fixture(scope="package")
def chrome() -> Iterator[webdriver.Chrome]:
    try:
        with chromium() as driver:
            yield driver
    except ServiceMissing as exc:
        service_missing(exc)


# The browser first: without a browser, no site is prepared.
@pytest.fixture(scope="package", params=BACKENDS)
def site(
    request: pytest.FixtureRequest,
    chrome: webdriver.Chrome,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    try:
        with site_on(request.param, tmp_path_factory.mktemp(request.param)) as site:
            yield site
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def visitor(
    request: pytest.FixtureRequest, chrome: webdriver.Chrome, site: Site
) -> Iterator[Browser]:
    """A browser on the site, logged in only if an earlier test did. Errors of scripts fail the test."""
    # A folder for each set of parameters, inside that of the backend.
    name = re.sub(rf"\[{site.backend}-?|\]", " ", request.node.name.removeprefix("test_"))
    name = re.sub(r"\W+", "-", name.strip())
    folder = ARTIFACTS / "browser" / site.backend / name
    shutil.rmtree(folder, ignore_errors=True)
    browser = Browser(chrome, site.address, folder)
    yield browser
    if request.node.stash[failed]:
        browser.picture("failed")
        browser.source()
        shutil.copy(site.project.folder / "server.log", folder)
    complaints = browser.complaints()
    assert not complaints, complaints


@pytest.fixture
def browser(visitor: Browser, site: Site) -> Browser:
    """The browser of a logged-in superuser."""
    visitor.open("/admin/")
    if visitor.all("#login-form"):
        log_in(visitor, site)
    return visitor
