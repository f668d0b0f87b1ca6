"""Debian's Chromium without a window, and what a test does with it.

Nothing is downloaded: the paths of both programs are given, so Selenium Manager does not run.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tests.patience import PATIENCE
from tests.services import find_program, keeper

DESKTOP = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}

# Elements for a selector, with a text in them: in one round trip, where Selenium's own calls
# take two for each.
_SHOWN = """[...document.querySelectorAll(arguments[0])].filter(
    e => e.checkVisibility({visibilityProperty: true}) && (e.innerText ?? "").includes(arguments[1])
)"""

T = TypeVar("T")


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own, which ends with this process at the latest.

    :raises ServiceMissing: Chromium or its driver is not installed.
    """
    options = Options()
    options.binary_location = find_program("Chromium", "chromium")
    for argument in (
        "--headless=new",
        "--window-size={width},{height}".format(**DESKTOP),
        "--hide-scrollbars",
        "--lang=en",
        # A container's /dev/shm may be small.
        "--disable-dev-shm-usage",
        # It asks nobody for anything but the site.
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--no-default-browser-check",
        # Through a pipe, so that it ends when the driver does, whatever that dies of.
        "--remote-debugging-pipe",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with one.
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(
        find_program("Chromium's driver", "chromedriver"),
        popen_kw={"preexec_fn": functools.partial(keeper.die_with_parent, signal.SIGTERM)},
    )
    driver = webdriver.Chrome(options, service)
    try:
        driver.set_page_load_timeout(PATIENCE)
        yield driver
    finally:
        driver.quit()


class Browser:
    """A browser on one site. Each page that is waited for is the one that was asked for.

    :param folder: where :meth:`picture` puts what it sees.
    """

    def __init__(self, driver: webdriver.Chrome, address: str, folder: Path) -> None:
        self.driver = driver
        self.address = address
        self.folder = folder
        self._pictures = 0
        self._screen(DESKTOP)

    # ##### Where it is #####

    def open(self, path: str) -> None:
        """Load a page of the site; returns when all of it has loaded."""
        self.driver.get(self.address + path)

    @property
    def path(self) -> str:
        return self.driver.current_url.removeprefix(self.address)

    @property
    def text(self) -> str:
        """What can be read on the page."""
        return self.one("body").text

    @contextmanager
    def next_page(self) -> Iterator[None]:
        """The block leads to another page (or to this one anew); leave it when that is there."""
        self.driver.execute_script("window.isLeft = true")
        yield
        there = "return !window.isLeft && document.readyState === 'complete'"
        self.wait(lambda: self.driver.execute_script(there), "another page")

    # ##### What is there #####

    def wait(self, condition: Callable[[], T], what: str) -> T:
        """Return what ``condition`` does, as soon as that is true."""
        # A page may change itself between finding an element and looking at it.
        moving = [StaleElementReferenceException, ElementClickInterceptedException]
        waiting = WebDriverWait(self.driver, PATIENCE, 0.05, moving)
        return waiting.until(lambda _: condition(), f"waited for {what} on {self.path}")

    def all(self, css: str) -> list[WebElement]:
        """The elements that are shown now; there may be none."""
        found: list[WebElement] = self.driver.execute_script(f"return {_SHOWN}", css, "")
        return found

    def one(self, css: str, text: str = "") -> WebElement:
        """The first element of this kind that is shown, with ``text`` in it; waits for it."""

        def found() -> WebElement | None:
            element: WebElement | None = self.driver.execute_script(
                f"return {_SHOWN}[0]", css, text
            )
            return element

        element = self.wait(found, f"{css!r}{f' with {text!r}' if text else ''}")
        assert element is not None
        return element

    def texts(self, css: str) -> list[str]:
        found: list[str] = self.driver.execute_script(
            rf"return {_SHOWN}.map(e => e.innerText.trim().replace(/\s+/g, ' '))", css, ""
        )
        return found

    def values(self, css: str) -> list[str]:
        """What fields hold."""
        found: list[str] = self.driver.execute_script(f"return {_SHOWN}.map(e => e.value)", css, "")
        return found

    def wait_for_pictures(self, css: str) -> None:
        """Return when the first of these have loaded: those below the window's end never do."""
        first = rf"return {_SHOWN}.slice(0, 4).every(e => e.complete && e.naturalWidth > 0)"
        self.wait(lambda: self.driver.execute_script(first, css, ""), f"pictures {css!r}")

    # ##### What is done #####

    def follow(self, css: str, text: str = "") -> None:
        """Click on what leads to another page."""
        element = self.one(css, text)
        with self.next_page():
            self.click(element)

    def click(self, element: WebElement) -> None:
        """Click on what is shown, once nothing is in front of it."""
        self.wait(lambda: [element.click()], "a click")

    def fill(self, **values: str) -> None:
        """Type into the fields of these names, in place of what they have."""
        for name, value in values.items():
            field = self.one(f"[name='{name}']")
            field.clear()
            field.send_keys(value)

    def choose(self, name: str, text: str) -> None:
        """Choose from a list."""
        Select(self.one(f"select[name='{name}']")).select_by_visible_text(text)

    def complete(self, css: str, text: str) -> None:
        """Type into a field that offers what begins so, and take the first offer."""
        self.one(f"{css} .select2-selection").click()
        self.one(".select2-search__field").send_keys(text)
        self.one(".select2-results__option--highlighted", text).click()

    @contextmanager
    def popup(self, css: str) -> Iterator[Browser]:
        """Click on what opens a window; the block is about that, and ends with its end."""
        windows = {*self.driver.window_handles}
        here = self.driver.current_window_handle
        self.one(css).click()
        self.wait(lambda: {*self.driver.window_handles} - windows, "a window")
        self.driver.switch_to.window(({*self.driver.window_handles} - windows).pop())
        try:
            yield self
            WebDriverWait(self.driver, PATIENCE, 0.05).until(
                lambda driver: {*driver.window_handles} == windows, "waited for a window to close"
            )
        finally:
            for left in {*self.driver.window_handles} - windows:
                self.driver.switch_to.window(left)
                self.driver.close()
            self.driver.switch_to.window(here)

    # ##### What is seen #####

    def picture(self, name: str) -> None:
        """Keep what is in the window, as a file of this name."""
        self._pictures += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        self.driver.get_screenshot_as_file(str(self.folder / f"{self._pictures:02d}-{name}.png"))

    def source(self) -> None:
        """Keep the page as HTML."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "page.html").write_text(self.driver.page_source, encoding="utf-8")

    def complaints(self) -> list[str]:
        """What the console of the browser was told since the last call: errors of scripts,
        files that did not load, what a policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    @contextmanager
    def phone(self) -> Iterator[None]:
        """The block looks at pages on a phone."""
        self._screen(PHONE)
        try:
            yield
        finally:
            self._screen(DESKTOP)

    def too_wide(self) -> int:
        """By how many pixels the page is wider than a phone."""
        page = "return document.documentElement.scrollWidth"
        return int(self.driver.execute_script(page)) - PHONE["width"]

    def _screen(self, what: dict[str, Any]) -> None:
        # A window has a frame, and is never as narrow as a phone.
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", what)
