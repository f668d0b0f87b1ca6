"""What is published: nothing is missing, nothing is too much, and it works without the checkout."""

from __future__ import annotations

import re
import tarfile
import zipfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest

from tests.docs.distribution import LEFT_OUT, Distributions, Installation, checkout
from tests.docs.markdown import ROOT, pages

EXTRAS_PUBLISHED = re.compile(r"sharded-orm\[([\w,]+)\]")
EXTRAS_IN_A_CHECKOUT = re.compile(r"-e '?\"?\.\[([\w,]+)\]")
# Written into a source distribution by the build.
GENERATED = ("PKG-INFO", "sharded_orm.egg-info/")

SMOKE = """
import importlib, pathlib, pkgutil, sys

from django.conf import settings

settings.configure(
    INSTALLED_APPS=["sharded_orm", *(f"django.contrib.{app}" for app in (
        "admin", "auth", "contenttypes", "messages", "sessions", "staticfiles"))],
    DATABASES={"default": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": ":memory:"}},
    DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
    STATIC_URL="/static/",
)
import django

django.setup()
import sharded_orm
from django.contrib.staticfiles import finders
from django.core.management import call_command
from django.template.loader import get_template

folder = pathlib.Path(sharded_orm.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
for name in sharded_orm.__all__:
    getattr(sharded_orm, name)
for path in (folder / "templates").rglob("*.html"):
    get_template(str(path.relative_to(folder / "templates")))
for path in (folder / "static").rglob("*.*"):
    assert finders.find(str(path.relative_to(folder / "static"))), path
call_command("migrate", verbosity=0)
call_command("makemigrations", check_changes=True, verbosity=0)
print(sharded_orm.__version__)
"""


def package() -> set[str]:
    return {name for name in checkout() if name.startswith("sharded_orm/")}


def test_the_wheel_has_each_file_of_the_package_and_no_other(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        names = set(wheel.namelist())
    information = {name for name in names if ".dist-info/" in name}
    assert names - information == package()
    assert {"sharded_orm/py.typed", "sharded_orm/static/sharded_orm/admin.css"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in information)


def test_the_source_distribution_is_the_checkout(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as sdist:
        names = {m.name.partition("/")[2] for m in sdist.getmembers() if m.isfile()}
    written = {name for name in names if name.startswith(GENERATED)}
    assert names - written == checkout() - LEFT_OUT


def test_it_works_without_the_checkout(installation: Installation, tmp_path: Path) -> None:
    done = installation.run(["-W", "error", "-c", SMOKE], tmp_path)
    assert done.returncode == 0, done.stdout
    (own,) = metadata.distributions(name="sharded-orm", path=[str(installation.packages)])
    assert done.stdout.strip() == own.version


def test_it_requires_nothing_but_django(installation: Installation) -> None:
    (own,) = metadata.distributions(name="sharded-orm", path=[str(installation.packages)])
    base = [line for line in own.requires or () if "extra ==" not in line]
    assert [line.partition("<")[0].partition(">")[0] for line in base] == ["Django"]


def extras() -> set[str]:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return set(setup["options.extras_require"])


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_extras_of_the_documentation_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    published = EXTRAS_PUBLISHED.findall(text)
    in_a_checkout = EXTRAS_IN_A_CHECKOUT.findall(text)
    named = {name for names in published + in_a_checkout for name in names.split(",")}
    assert named | set(re.findall(r"extras? `(\w+)`", text)) <= extras()
    # Until the package is published, a reader needs the other line.
    assert not published or "pip install -e " in text


def test_every_extra_for_users_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    named = {name for names in EXTRAS_PUBLISHED.findall(text) for name in names.split(",")}
    assert named == extras() - {"demo", "docs", "lanes", "test"}
