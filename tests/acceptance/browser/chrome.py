"""Debian's Chromium without a window, and a class for tests to use it.

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

# Visible elements of a selector that contain a text. One round trip; Selenium's own calls need
# two for each element.
_VISIBLE = """[...document.querySelectorAll(arguments[0])].filter(
    e => e.checkVisibility({visibilityProperty: true}) && (e.innerText ?? "").includes(arguments[1])
)"""

T = TypeVar("T")


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Start a browser with a profile of its own. It ends with this process at the latest.

    :raises ServiceMissing: Chromium or its driver is not installed.
    """
    options = Options()
    # The shell has no window and needs half as much processor time.
    names = ("chromium-headless-shell", "chromium")
    options.binary_location = find_program("Chromium", *names)
    for argument in (
        "--headless",
        "--window-size={width},{height}".format(**DESKTOP),
        "--hide-scrollbars",
        "--lang=en",
        # A container's /dev/shm may be small.
        "--disable-dev-shm-usage",
        # No requests to any host but the site.
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--no-default-browser-check",
        # Through a pipe: the browser ends with the driver, even if the driver is killed.
        "--remote-debugging-pipe",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # As root, Chromium runs only without a sandbox.
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
    """A browser on one site. Its methods wait until the page is there.

    :param folder: for the screenshots of :meth:`picture`.
    """

    def __init__(self, driver: webdriver.Chrome, address: str, folder: Path) -> None:
        self.driver = driver
        self.address = address
        self.folder = folder
        self._pictures = 0
        self._screen(DESKTOP)

    # ##### Navigation #####

    def open(self, path: str) -> None:
        """Load a page of the site; return when it has loaded."""
        self.driver.get(self.address + path)

    @property
    def path(self) -> str:
        return self.driver.current_url.removeprefix(self.address)

    @property
    def text(self) -> str:
        """The visible text of the page."""
        return self.one("body").text

    @contextmanager
    def next_page(self) -> Iterator[None]:
        """Wait after the block until the page to which the block leads has loaded."""
        self.driver.execute_script("window.isLeft = true")
        yield
        there = "return !window.isLeft && document.readyState === 'complete'"
        self.wait(lambda: self.driver.execute_script(there), "another page")

    # ##### Elements #####

    def wait(self, condition: Callable[[], T], what: str) -> T:
        """Wait until ``condition`` returns a true value, and return the value."""
        # A script may change the page between finding an element and reading it.
        moving = [StaleElementReferenceException, ElementClickInterceptedException]
        waiting = WebDriverWait(self.driver, PATIENCE, 0.05, moving)
        return waiting.until(lambda _: condition(), f"waited for {what} on {self.path}")

    def all(self, css: str) -> list[WebElement]:
        """The visible elements; there may be none."""
        elements: list[WebElement] = self.driver.execute_script(f"return {_VISIBLE}", css, "")
        return elements

    def one(self, css: str, text: str = "") -> WebElement:
        """The first visible element with ``text`` in it; wait for it."""

        def first() -> WebElement | None:
            element: WebElement | None = self.driver.execute_script(
                f"return {_VISIBLE}[0]", css, text
            )
            return element

        element = self.wait(first, f"{css!r}{f' with {text!r}' if text else ''}")
        assert element is not None
        return element

    def texts(self, css: str) -> list[str]:
        texts: list[str] = self.driver.execute_script(
            rf"return {_VISIBLE}.map(e => e.innerText.trim().replace(/\s+/g, ' '))", css, ""
        )
        return texts

    def values(self, css: str) -> list[str]:
        """The values of form fields."""
        values: list[str] = self.driver.execute_script(
            f"return {_VISIBLE}.map(e => e.value)", css, ""
        )
        return values

    def wait_for_pictures(self, css: str) -> None:
        """Wait until the first images have loaded. Images below the window are not loaded."""
        first = rf"return {_VISIBLE}.slice(0, 4).every(e => e.complete && e.naturalWidth > 0)"
        self.wait(lambda: self.driver.execute_script(first, css, ""), f"pictures {css!r}")

    # ##### Actions #####

    def follow(self, css: str, text: str = "") -> None:
        """Click on an element that leads to another page."""
        element = self.one(css, text)
        with self.next_page():
            self.click(element)

    def click(self, element: WebElement) -> None:
        """Click on an element, once nothing covers it."""
        self.wait(lambda: [element.click()], "a click")

    def fill(self, **values: str) -> None:
        """Replace the values of the fields with these names."""
        for name, value in values.items():
            field = self.one(f"[name='{name}']")
            field.clear()
            field.send_keys(value)

    def choose(self, name: str, text: str) -> None:
        """Choose an option of a ``select``."""
        Select(self.one(f"select[name='{name}']")).select_by_visible_text(text)

    def complete(self, css: str, text: str) -> None:
        """Type into an autocomplete field, and take the first suggestion."""
        self.one(f"{css} .select2-selection").click()
        self.one(".select2-search__field").send_keys(text)
        self.one(".select2-results__option--highlighted", text).click()

    @contextmanager
    def popup(self, css: str) -> Iterator[Browser]:
        """Click on a link that opens a window. The block works in that window, and must close it."""
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
            for handle in {*self.driver.window_handles} - windows:
                self.driver.switch_to.window(handle)
                self.driver.close()
            self.driver.switch_to.window(here)

    # ##### Artifacts #####

    def picture(self, name: str) -> None:
        """Save a screenshot of the window."""
        self._pictures += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        self.driver.get_screenshot_as_file(str(self.folder / f"{self._pictures:02d}-{name}.png"))

    def source(self) -> None:
        """Save the page as HTML."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "page.html").write_text(self.driver.page_source, encoding="utf-8")

    def complaints(self) -> list[str]:
        """The messages of the browser's console since the last call: errors of scripts, files
        that did not load, violations of a policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    @contextmanager
    def phone(self) -> Iterator[None]:
        """Use the screen of a phone for the block."""
        self._screen(PHONE)
        try:
            yield
        finally:
            self._screen(DESKTOP)

    def too_wide(self) -> int:
        """The number of pixels by which the page is wider than the screen of a phone."""
        page = "return document.documentElement.scrollWidth"
        return int(self.driver.execute_script(page)) - PHONE["width"]

    def _screen(self, what: dict[str, Any]) -> None:
        # Emulated, because a window cannot be as narrow as a phone.
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", what)
