"""The documentation compared with the code: examples compile, reference pages are complete."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from django.utils.module_loading import import_string

from sharded_orm import contrib, exceptions
from sharded_orm.admin import checks as admin_checks
from sharded_orm.admin import exceptions as admin_exceptions
from sharded_orm.admin import inlines
from sharded_orm.checks import cache, commands, databases, models, packages, relations, sqlite_files
from sharded_orm.checks import nodes as node_checks
from sharded_orm.conf import cache as cache_setting
from sharded_orm.conf import groups, nodes, parser, tickets
from sharded_orm.ids.tickets import exceptions as ticket_exceptions
from sharded_orm.models import installation
from sharded_orm.operations import exceptions as operations_exceptions
from sharded_orm.routing.base import BUILT_IN
from sharded_orm.topology.sources.base import BUILT_IN as SOURCES
from sharded_orm.topology.sources.base import COMMON
from tests.docs.markdown import DOCS, ROOT, Block, blocks, pages
from tests.docs.pictures import IMAGES, PICTURES

REFERENCE = DOCS / "reference"
PYTHON = [b for page in pages() for b in blocks(page) if b.language == "python"]
#: The apps of contrib have modules of these names.
CONTRIB = {
    part: [
        import_module(".".join(path.with_suffix("").parts[-4:]))
        for path in sorted(Path(contrib.__path__[0]).glob(f"*/{part}.py"))
    ]
    for part in ("checks", "exceptions")
}
ERRORS = [
    error
    for module in (
        exceptions,
        admin_exceptions,
        operations_exceptions,
        ticket_exceptions,
        *CONTRIB["exceptions"],
    )
    for _, error in inspect.getmembers(module, inspect.isclass)
    if issubclass(error, exceptions.ShardedOrmError) and error.__module__ == module.__name__
]
CHECK = re.compile(r"sharded_orm(?:_[a-z]+)?\.[EW]\d{3}")
CHECKS = {
    check
    for module in (
        admin_checks,
        cache,
        commands,
        models,
        databases,
        node_checks,
        packages,
        sqlite_files,
        installation,
        relations,
        inlines,
        *CONTRIB["checks"],
    )
    for check in CHECK.findall(inspect.getsource(module))
}
#: The names of the settings, one set for each part of SHARDED_ORM.
SETTINGS = (
    parser.KEYS,
    cache_setting.KEYS,
    groups.KEYS,
    groups.RANGE_KEYS,
    nodes.KEYS,
    parser.ADMIN_KEYS,
    tickets.KEYS,
)


def read(page: str) -> str:
    return (REFERENCE / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_examples_compile(block: Block) -> None:
    compile(inspect.cleandoc(block.code), str(block), "exec")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    # Sphinx checks its own pages; README and CONTRIBUTING are not among them.
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_pictures_are_those_that_the_tests_take() -> None:
    # Small enough for git; ``python -m tests.docs.pictures`` compresses them.
    assert {path.name for path in IMAGES.iterdir()} == {f"{name}.png" for name in PICTURES}
    for path in IMAGES.iterdir():
        assert path.stat().st_size < 150_000, path
        shown = [p for p in pages() if f"images/{path.name})" in p.read_text(encoding="utf-8")]
        assert shown, f"no page shows {path.name}"


@pytest.mark.parametrize("error", ERRORS)
def test_every_exception_is_documented(error: type[Exception]) -> None:
    text = read("exceptions.md")
    assert f"\n| `{error.__name__}` |" in text
    bases = [b.__name__ for b in error.__bases__ if not issubclass(b, exceptions.ShardedOrmError)]
    if bases != ["Exception"]:
        shown = f" ({', '.join(bases)})" if bases else ""
        line = next(part for part in text.splitlines() if f"─ {error.__name__} " in f"{part} ")
        assert line.partition(error.__name__)[2].strip() == shown.strip()


def test_every_check_is_documented() -> None:
    assert set(CHECK.findall(read("checks.md"))) == CHECKS


@pytest.mark.parametrize("keys", SETTINGS, ids=len)
def test_every_setting_is_documented(keys: set[str]) -> None:
    text = read("settings.md")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert {key for key in keys if f"`{key}`" not in rows} == set()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_strategy_and_its_options_are_documented(name: str) -> None:
    text = read("settings.md")
    assert f'`"{name}"`' in text
    for option in import_string(BUILT_IN[name]).option_names:
        assert re.search(rf"^\| `{name}` \|.*`{option}`", text, re.MULTILINE), option


@pytest.mark.parametrize("name", SOURCES)
def test_every_option_of_a_source_is_documented(name: str) -> None:
    text = read("settings.md")
    assert f'`"{name}"`' in text
    for option in import_string(SOURCES[name]).option_names | COMMON:
        assert re.search(rf"^\| (`{name}`|all but `static`) \| `{option}`", text, re.MULTILINE), (
            option
        )


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("0*.md")), ids=lambda p: p.stem)
def test_decisions_name_modules_that_exist(page: Path) -> None:
    (line,) = (line for line in page.read_text().splitlines() if line.startswith("- Touches:"))
    for name in re.findall(r"`([a-z_0-9.]+)`", line):
        path = ROOT / "sharded_orm" / name.removeprefix("sharded_orm.").replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file() or (ROOT / name).is_file(), name
