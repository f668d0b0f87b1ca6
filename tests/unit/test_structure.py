"""Rules of the code that the import contracts cannot hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sharded_orm

PACKAGE = Path(sharded_orm.__file__).parent


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Path inside the package -> its parsed source."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


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
        for path, module in modules()
        if not path.startswith("backends/")
        for node in ast.walk(module)
        if isinstance(node, ast.Compare | ast.Match) and compares_vendor(node)
    ]
    assert places == []


def test_a_comparison_would_be_found() -> None:
    for code in ("c.vendor == 'mysql'", "'sqlite' != vendor", "a.b.vendor in ('mysql',)"):
        assert compares_vendor(ast.parse(code, mode="eval").body)
