"""Reads that call functions which Django itself writes into statements count as reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest

from sharded_orm.backends.mysql.statement_kind import calls_stored_function
from sharded_orm.backends.postgresql.statement_kind import is_repeatable

_DJANGO = Path(django.__file__).parent
_MODULES = {
    "common": [
        "db/models/functions/*.py",
        *(
            f"db/models/{name}.py"
            for name in ("aggregates", "expressions", "lookups", "fields/json")
        ),
    ],
    "mysql": ["db/backends/mysql/operations.py"],
    "postgresql": [
        "db/backends/postgresql/operations.py",
        *(f"contrib/postgres/{name}.py" for name in ("functions", "lookups", "search")),
        "contrib/postgres/aggregates/*.py",
        "contrib/postgres/fields/*.py",
    ],
}
# Words that Django writes before a parenthesis in messages, in statements that change something, or
# for other databases.
_OTHERS = {
    "mysql": """CHR COLLATE DIGEST ENCODE FIELD_CAST_SQL FILTER INSTEAD JSONB_BUILD_ARRAY JSONB_BUILD_OBJECT
        JSONNULL JSON_QUERY LOOKUP_CAST RANDOM S SHA224 SHA256 SHA384 SHA512 STATEMENT_TIMESTAMP
        STRING_AGG STRPOS UUIDV4 UUIDV7""",
    "postgresql": """CHARFIELD COLLATE CONFLICT DIGEST EMAILFIELD FIELD_CAST_SQL INSTEAD INSTR JSONNULL JSON_CONTAINS
        JSON_CONTAINS_PATH JSON_EXTRACT JSON_QUERY JSON_TYPE JSON_UNQUOTE JSON_VALUE LOOKUP_CAST ORD
        PG_GET_SERIAL_SEQUENCE RAND S SETVAL SET_CONFIG SHA1 SHA2 TEXTFIELD UUID UUID_V4 UUID_V7 VALUE""",
}  # fmt: skip
_WORD = re.compile(r"([A-Za-z_]\w*)\s*\((?!s\))")


def _constants(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value:
            yield part.value


def _functions(node: ast.AST, skipped: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Raise) or (isinstance(node, ast.FunctionDef) and node.name in skipped):
        return
    if isinstance(node, ast.Assign):
        targets: list[Any] = node.targets
        if any(getattr(each, "id", getattr(each, "attr", "")) == "function" for each in targets):
            yield from _constants(node.value)
    elif isinstance(node, ast.keyword) and node.arg == "function":
        yield from _constants(node.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _WORD.findall(node.value)
    for child in ast.iter_child_nodes(node):
        yield from _functions(child, skipped)


@pytest.mark.parametrize("vendor", ["mysql", "postgresql"])
def test_functions_of_django_only_read(vendor: str) -> None:
    skipped = {"as_sqlite", "as_oracle", "as_mysql", "as_postgresql"} - {f"as_{vendor}"}
    found = set()
    for pattern in (*_MODULES["common"], *_MODULES[vendor]):
        for path in _DJANGO.glob(pattern):
            found |= {name.upper() for name in _functions(ast.parse(path.read_text()), skipped)}
    assert {"COALESCE", "EXTRACT", "SUM", "ROW_NUMBER"} <= found
    unknown = []
    for name in sorted(found - set(_OTHERS[vendor].split())):
        sql = f"SELECT {name}(a) FROM t"
        if calls_stored_function(sql) if vendor == "mysql" else not is_repeatable(sql):
            unknown.append(name)
    assert unknown == []
