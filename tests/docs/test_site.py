"""The documentation as a site: it builds without a warning, and its index has every name."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sharded_orm
from sharded_orm.management.actions import CommandOfActions
from sharded_orm.management.commands import shards, topology
from tests.docs.markdown import DOCS, ROOT
from tests.docs.test_pages import CHECKS, ERRORS, SETTINGS
from tests.patience import PATIENCE

COMMANDS = ROOT / "sharded_orm" / "management" / "commands"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-b", "html", str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def index(site: Path) -> set[str]:
    """The entries of the index, such as ``POOL (setting: A node)``."""
    entries = set()
    name = ""
    text = (site / "genindex.html").read_text(encoding="utf-8")
    # Entries of one name are one item with a list inside.
    for part in re.findall(r"<li>(.*?)(?=<li>|<ul>|</li>)", text, re.DOTALL):
        entry = " ".join(html.unescape(re.sub(r"<[^>]+>", "", part)).split())
        # The numbers of further places.
        entry = re.sub(r"(, \[\d+\])+$", "", entry)
        if entry.startswith("("):
            entry = f"{name} {entry}"
        name = entry.partition(" (")[0]
        entries.add(entry)
    return entries


def names(index: set[str], kind: str) -> set[str]:
    """Return the names of one kind, such as ``exception``."""
    matches = (re.fullmatch(rf"(.+) \({re.escape(kind)}(: .+)?\)", entry) for entry in index)
    return {match[1] for match in matches if match}


def test_each_setting_is_in_the_index(index: set[str]) -> None:
    found = names(index, "setting")
    assert {"DATABASES", "DATABASE_ROUTERS", "SHARDED_ORM"}.union(*SETTINGS) - found == set()


def test_each_check_and_each_exception_is_in_the_index(index: set[str]) -> None:
    assert names(index, "system check") == CHECKS
    assert names(index, "exception") == {error.__name__ for error in ERRORS}


def test_each_command_is_in_the_index(index: set[str]) -> None:
    commands = {path.stem for path in COMMANDS.glob("[a-z]*.py")}
    assert commands - names(index, "command") - names(index, "command of Django") == set()


@pytest.mark.parametrize("command", [shards, topology], ids=lambda module: module.__name__)
def test_each_action_is_in_the_index(command: ModuleType, index: set[str]) -> None:
    name = command.__name__.rpartition(".")[2]
    actions: type[CommandOfActions] = command.Command
    assert {f"{name} {action.name}" for action in actions.actions} <= names(index, "command")


def test_the_index_leads_to_places_that_exist(site: Path) -> None:
    text = (site / "genindex.html").read_text(encoding="utf-8")
    by_page: dict[str, set[str]] = {}
    for page, address in re.findall(r'<a href="([\w/-]+\.html)#([^"]+)"', text):
        by_page.setdefault(page, set()).add(address)
    assert len(by_page) >= 10
    for page, addresses in by_page.items():
        ids = re.findall(r' id="([^"]+)"', (site / page).read_text(encoding="utf-8"))
        assert addresses <= set(ids), page
        assert len(ids) == len(set(ids)), page


def test_each_page_names_the_version(site: Path) -> None:
    for page in ("index.html", "reference/settings.html", "genindex.html"):
        text = (site / page).read_text(encoding="utf-8")
        title, footer = (
            re.search(r"<title>(.*?)</title>", text, re.DOTALL),
            text.partition("<footer>"),
        )
        assert title is not None
        assert sharded_orm.__version__ in title[1]
        assert sharded_orm.__version__ in footer[2]


def test_the_search_knows_the_pages(site: Path) -> None:
    assert "scatter" in (site / "searchindex.js").read_text(encoding="utf-8")
    assert 'name="q"' in (site / "index.html").read_text(encoding="utf-8")
