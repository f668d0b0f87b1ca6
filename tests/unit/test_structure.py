"""Rules of the code that the import contracts cannot hold."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import sharded_orm

PACKAGE = Path(sharded_orm.__file__).parent


@cache
def modules() -> list[tuple[str, list[ast.AST]]]:
    """Path inside the package -> the nodes of its source."""
    return [
        (path.relative_to(PACKAGE).as_posix(), list(ast.walk(ast.parse(path.read_text()))))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def names_vendor(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "vendor") or (
        isinstance(node, ast.Name) and node.id == "vendor"
    )


def compares_vendor(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(map(names_vendor, (node.left, *node.comparators)))
    return isinstance(node, ast.Match) and names_vendor(node.subject)


def test_only_backends_compare_vendors() -> None:
    """Elsewhere ``sharded_orm.backends.features`` answers what a database can do."""
    places = [
        f"{path}:{node.lineno}"
        for path, nodes in modules()
        if not path.startswith("backends/")
        for node in nodes
        if isinstance(node, ast.Compare | ast.Match) and compares_vendor(node)
    ]
    assert places == []


def tells_mariadb(node: ast.AST) -> bool:
    """Whether ``node`` asks whether a server is MariaDB: by Django's attribute, or by a version."""
    if isinstance(node, ast.Compare):
        parts = (node.left, *node.comparators)
        return any(isinstance(part, ast.Constant) and part.value == "mariadb" for part in parts)
    return isinstance(node, ast.Attribute) and node.attr == "mysql_is_mariadb"


def test_only_one_module_tells_mariadb_from_mysql() -> None:
    places = {path for path, nodes in modules() for node in nodes if tells_mariadb(node)}
    assert places == {"mysql_flavor.py"}


def names_version(node: ast.AST) -> bool:
    """Whether ``node`` refers to the version of Django or of Python."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("VERSION", "version_info", "get_version")
    return isinstance(node, ast.ImportFrom) and (
        node.module == "django.utils.version"
        or any(alias.name in ("VERSION", "get_version") for alias in node.names)
    )


def test_only_one_module_knows_versions() -> None:
    """Elsewhere the code is that for the newest version; ``sharded_orm.compat`` has the rest."""
    places = {path for path, nodes in modules() for node in nodes if names_version(node)}
    assert places == {"compat.py"}


def test_only_one_module_of_the_tests_knows_versions() -> None:
    tests = Path(__file__).parents[1]
    places = {
        path.relative_to(tests).as_posix()
        for path in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if names_version(node)
    }
    # These find files of the installed version.
    finders = {"django_suite/source.py", "unit/django_suite/test_compare.py"}
    assert places - finders == {"versions.py"}


def test_a_version_would_be_found() -> None:
    for code in ("django.VERSION >= (6, 1)", "from django import VERSION", "sys.version_info"):
        assert any(map(names_version, ast.walk(ast.parse(code))))


def test_a_comparison_would_be_found() -> None:
    for code in ("c.vendor == 'mysql'", "'sqlite' != vendor", "a.b.vendor in ('mysql',)"):
        assert compares_vendor(ast.parse(code, mode="eval").body)
