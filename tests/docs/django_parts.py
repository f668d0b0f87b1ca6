"""The parts of Django on which the package relies beyond Django's documentation.

``python -m tests.docs.django_parts`` prints which of them the installed Django has changed since the
fingerprints were written. With ``--write`` it then writes the fingerprints of this version.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import django

import sharded_orm
from tests.versions import DJANGO_RELEASE, DJANGO_VERSION

PACKAGE = Path(sharded_orm.__file__).parent
COMMANDS = PACKAGE / "management" / "commands"
DJANGO = Path(django.__file__).parent
#: Version of Django -> part -> fingerprint of its source.
FINGERPRINTS = Path(__file__).parent / "django_parts.json"
COMMAND = "python -m tests.docs.django_parts"
PLACES = (
    "apps",
    "contrib/admin",
    "contrib/contenttypes",
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
    "_cache", "_check", "_check_model", "_choices", "_compile", "_count", "_create_server", "_current", "_description", "_execute", "_file", "_identity", "_json",
    "_lock", "_order", "_path", "_prepare", "_quote", "_relations", "_rename", "_render", "_settings",
    "_store", "_templates",
    "_unique", "_update", "_url", "_values", "_version", "_wrapper", "_write",
}  # fmt: skip
# Of argparse, psycopg and asgiref.
OTHERS = {"_actions", "_info", "_storage"}
# A comment of the package that names a method of a class of Django.
OVERRIDES = re.compile(r"\b([A-Z]\w+)\.(\w+)\b")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def _modules() -> dict[str, tuple[str, ast.Module]]:
    """Path -> source and syntax tree, of the modules of Django that the package may rely on.

    Of Django's commands, these are the ones that the package derives its own from.
    """
    sources = {
        path.relative_to(DJANGO).as_posix(): path.read_text()
        for place in PLACES
        for path in sorted((DJANGO / place).rglob("*.py"))
        if path.parent.name != "commands" or (COMMANDS / path.name).exists()
    }
    return {name: (source, ast.parse(source)) for name, source in sources.items()}


def _assigned(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _Definition):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@cache
def used_private_parts() -> set[str]:
    """Return the private names of Django that the package overrides or uses."""
    private = {
        name for _, tree in _modules().values() for name in _assigned(tree) if PRIVATE.match(name)
    }
    return (_used() & private) - OWN - OTHERS - DOCUMENTED


def _used() -> set[str]:
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # As of getattr() and attrgetter().
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django"):
                names.update(alias.name for alias in node.names)
    return names


def _named_in_comments() -> set[tuple[str, str]]:
    """Return the classes and methods that comments of the package name as ``Class.method``."""
    return {
        (match[1], match[2])
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith("#")
        for match in OVERRIDES.finditer(line)
    }


@cache
def fingerprints() -> dict[str, str]:
    """Return a fingerprint of the source of each part in the installed Django.

    The parts are all functions, methods and classes with a private name that the package uses, and
    all methods that a comment of the package names. The fingerprint does not depend on the version of
    Python, on comments, docstrings and layout.
    """
    private, public = used_private_parts(), _named_in_comments()
    return {
        f"{module}: {'.'.join(names)}": _fingerprint(source, node)
        for module, (source, tree) in _modules().items()
        for names, node in _definitions(tree, ())
        if names[-1] in private or names[-2:] in public
    }


def _definitions(
    tree: ast.AST, outside: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], _Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Definition):
            names = (*outside, node.name)
            yield names, node
            yield from _definitions(node, names)
        else:
            yield from _definitions(node, outside)


def _fingerprint(source: str, node: _Definition) -> str:
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    for inner in ast.walk(node):
        if isinstance(inner, _Definition) and ast.get_docstring(inner, clean=False) is not None:
            docstring = inner.body[0]
            for number in range(docstring.lineno, (docstring.end_lineno or 0) + 1):
                lines[number - 1] = "\n"
    text = "".join(lines[first - 1 : node.end_lineno])
    return hashlib.sha256("".join(_without_comments(text).split()).encode()).hexdigest()[:16]


def _without_comments(text: str) -> str:
    lines = text.splitlines(keepends=True)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (tokenize.TokenError, IndentationError):
        pass  # The text ends inside of a block. All of its comments have been seen.
    return "".join(lines)


def read() -> dict[str, dict[str, str]]:
    """Return the fingerprints in the file, by version."""
    versions: dict[str, dict[str, str]] = json.loads(FINGERPRINTS.read_text())
    return versions


def changes(known: dict[str, str], current: dict[str, str]) -> list[str]:
    """Return a line for each part that differs."""
    return [
        f"{'added' if part not in known else 'gone' if part not in current else 'changed'}: {part}"
        for part in sorted(known.keys() | current.keys())
        if known.get(part) != current.get(part)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the fingerprints")
    parser.add_argument("--against", default=DJANGO_VERSION, metavar="VERSION",
                        help="version of Django to compare with (default: %(default)s)")  # fmt: skip
    options = parser.parse_args()
    versions = read() if FINGERPRINTS.exists() else {}
    current = fingerprints()
    lines = changes(versions.get(options.against, {}), current)
    print(*lines, sep="\n")
    print(f"Django {DJANGO_RELEASE} in {DJANGO}: {len(lines)} of {len(current)} parts")
    if options.write:
        versions[DJANGO_VERSION] = current
        FINGERPRINTS.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
