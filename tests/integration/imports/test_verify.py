"""``shards import --verify`` finds each fault of a copy, by code of its own."""

from __future__ import annotations

import ast

import pytest

from tests.integration.imports.site import ROOT, Site

_ON_SHARD = "execute(home(7), {sql!r})"
FAULTS = {
    "a changed text": ("UPDATE library_book SET title = 'Book 7' WHERE id = 7",
                       "has another 'title'"),
    "a changed time zone": ("UPDATE library_book SET changed_at = '2020-03-04 06:06:07.890123' WHERE id = 7",
                            "has another 'changed_at'"),
    "NULL for 0": ("UPDATE library_book SET pages = NULL WHERE id = 7", "has another 'pages'"),
    "0 for NULL": ("UPDATE library_book SET published = (1 = 0) WHERE id = 7",
                   "has another 'published'"),
    "an empty text for NULL": ("UPDATE library_book SET secret = '' WHERE id = 7",
                               "has another 'secret'"),
    "JSON's null for NULL": ("UPDATE library_book SET extra = 'null' WHERE id = 7",
                             "has another 'extra'"),
    "a missing row": ("DELETE FROM library_book WHERE id = 7", "library.Book(pk=7) is missing on"),
    "another owner": ("UPDATE library_book SET writer_id = 77 WHERE id = 7",
                      "has another 'writer_id'"),
    "a row of its own": ("INSERT INTO library_book (id, writer_id, title, changed_at) VALUES"
                         " (999, 8, 'x', '2020-01-01')", "library.Book(pk=999) is on"),
}  # fmt: skip
_PREPARE = """
from sharded_orm import runtime
def home(pk):
    return runtime.locate("books", pk % 8 + 1).alias
"""


@pytest.fixture
def copied(site: Site) -> Site:
    site.fill()
    site.run("execute('default', 'UPDATE library_book SET pages = 0')")
    site.copy()
    site.copy("--verify")
    return site


def test_each_fault_is_found(copied: Site) -> None:
    for name, (sql, message) in FAULTS.items():
        copied.run(_PREPARE + _ON_SHARD.format(sql=sql))
        done = copied.copy("--verify", code=1)
        assert message in done.err, (name, done.err)
        # Put the row back.
        copied.run(_PREPARE + "execute(home(7), 'DELETE FROM library_book WHERE id IN (7, 999)')")
        copied.copy()
    copied.copy("--verify")


def test_a_row_on_a_second_shard_is_found(copied: Site) -> None:
    alias = copied.run(
        _PREPARE
        + """
other = next(shard.alias for shard in runtime.group("books").shards() if shard.alias != home(7))
execute(other, "INSERT INTO library_book (id, writer_id, title, changed_at) VALUES (7, 8, 'x', '2020-01-01')")
print(other)
"""
    )
    done = copied.copy("--verify", "--json", code=1)
    assert done.json["tables"]["library.Book"]["misplaced"] == 1
    assert f"library.Book(pk=7) is on '{alias}', but its key 8 belongs on" in done.err


def test_the_comparison_shares_no_reading_or_writing_with_the_copier() -> None:
    """Of the copier's modules it takes only the cutting into ranges, whose result it checks."""
    path = ROOT / "sharded_orm/operations/imports/row_comparison.py"
    imported = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if node.module.startswith("sharded_orm.operations.imports")
    }
    names = {name for _, name in imported}
    assert names == {
        "range_units", "report_of", "check_source", "ImportReport", "ImportRequest", "add_counts",
        "SourceTable",
    }  # fmt: skip
    assert ".stored(" not in path.read_text() and "StoredColumn" not in path.read_text()
