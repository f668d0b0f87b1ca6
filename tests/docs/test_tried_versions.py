"""``docs/howto/other-packages.md`` names the versions of packages that were tried."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import version

from packaging.requirements import Requirement
from packaging.version import Version

from tests.docs.markdown import DOCS, ROOT

PAGE = (DOCS / "howto" / "other-packages.md").read_text(encoding="utf-8")
TRIED = dict(re.findall(r"^\| ([A-Za-z_-]+) \| ([0-9][0-9.]*) \|$", PAGE, re.MULTILINE))
#: Names in headings of the page.
SPELLINGS = {"djangorestframework": "Django REST framework", "uvicorn": "ASGI servers"}


def _requirements() -> list[Requirement]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"]["test"] + config["options"]["install_requires"]
    return [Requirement(line) for line in lines.split("\n") if line and line[0] != "#"]


def test_the_versions_are_between_the_oldest_that_is_accepted_and_the_installed_one() -> None:
    """After an upgrade, run the tests of the helpdesk, and write the new versions on the page."""
    accepted = {requirement.name: requirement.specifier for requirement in _requirements()}
    assert TRIED
    for name, tried in TRIED.items():
        assert accepted[name].contains(tried), f"{name} {tried}: see setup.cfg"
        assert Version(tried) <= Version(version(name)), f"{name} {tried} is not installed here"


def test_each_package_with_a_section_is_in_the_table() -> None:
    sections = "\n".join(re.findall(r"^## .*", PAGE, re.MULTILINE)).lower()
    names = {requirement.name for requirement in _requirements()} - {"Django"}
    with_section = {n for n in names if SPELLINGS.get(n, n).lower() in sections}
    assert with_section == TRIED.keys() - {"Django"}
