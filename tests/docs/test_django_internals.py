"""The page about private parts of Django against the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import django

import sharded_orm

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "django-internals.md"
PACKAGE = Path(sharded_orm.__file__).parent
DJANGO = Path(django.__file__).parent
PARTS_OF_DJANGO = (
    "apps",
    "contrib/admin",
    "core/checks",
    "core/management",
    "db",
    "forms",
    "test",
    "utils",
)
PRIVATE = re.compile(r"_[a-zA-Z]")
DOCUMENTED = {"_base_manager", "_default_manager", "_meta", "_state"}
# Names of the library's own that Django happens to use somewhere as well.
OWN = {
    "_cache", "_check", "_check_model", "_choices", "_compile", "_count", "_create_server", "_description", "_execute", "_file", "_identity", "_json",
    "_lock", "_order", "_path", "_prepare", "_query", "_quote", "_relations", "_render", "_store", "_templates",
    "_unique", "_update", "_url", "_values", "_version", "_wrapper", "_write",
}  # fmt: skip
# Of argparse.
OTHERS = {"_actions"}


def _assigned(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _private_parts() -> set[str]:
    return {
        name
        for part in PARTS_OF_DJANGO
        for path in (DJANGO / part).rglob("*.py")
        for name in _assigned(ast.parse(path.read_text()))
        if PRIVATE.match(name)
    }


def _used() -> set[str]:
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django"):
                names.update(alias.name for alias in node.names)
    return names


def test_the_page_lists_what_is_used() -> None:
    listed = set(re.findall(r"`(?:[\w.]+\.)?(_[a-zA-Z]\w*)`", PAGE.read_text()))
    used = (_used() & _private_parts()) - OWN - OTHERS
    assert listed - DOCUMENTED == used - DOCUMENTED


def test_the_page_is_about_this_version() -> None:
    version = ".".join(map(str, django.VERSION[:2]))
    assert f"Checked against Django {version}" in PAGE.read_text()
