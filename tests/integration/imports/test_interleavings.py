"""What happens between two statements of an import."""

from __future__ import annotations

from tests.integration.imports.site import DEFINITIONS, Site

_IMPORT = """
from io import StringIO
from django.core.management import CommandError, call_command
def copy(*options):
    try:
        call_command("shards", "import", "library.Book", "library.Topic", *options, source="default",
                     stdout=StringIO(), verbosity=0)
    except CommandError as exc:
        return str(exc)
    return "ok"
"""


def test_two_workers_store_the_same_rows_at_once(site: Site) -> None:
    """A worker that was cut off has read that rows are missing, and another inserts them."""
    site.fill()
    output = site.run(
        _IMPORT
        + """
from sharded_orm.operations.imports.shard_tables import ShardTable, Stored
insert, store = ShardTable._insert, ShardTable.store
others = []
def insert_second(self, rows):
    if len(others) < 2:
        others.append(Stored())
        ShardTable._insert = insert
        # Another worker stores some of the rows first, then all of them.
        some = rows[: len(rows) // 2 + len(others)]
        ShardTable(self._table, self._alias, update=False).store(some, others[-1])
        ShardTable._insert = insert_second
    insert(self, rows)
ShardTable._insert = insert_second
print(copy(), [other.copied > 0 for other in others])
"""
    )
    assert output == "ok [True, True]"
    assert site.ids() == list(range(1, 41))


def test_a_row_changes_again_before_it_is_overwritten(site: Site) -> None:
    site.fill()
    output = site.run(
        _IMPORT
        + """
from sharded_orm import runtime
from sharded_orm.operations.imports.shard_tables import ShardTable
copy()
execute("default", "UPDATE library_book SET title = 'second' WHERE id = 7")
lock = ShardTable._lock
def lock_after_change(self, cursor, pks):
    execute("default", "UPDATE library_book SET title = 'third' WHERE id = 7")
    lock(self, cursor, pks)
ShardTable._lock = lock_after_change
copy("--update", "--rounds", "1")
print(Book.objects.get(writer_id=8, pk=7).title)
"""
    )
    assert output == "third"


def test_a_row_appears_after_its_range_was_copied(site: Site) -> None:
    """A child is copied before its parent, which the next round finds."""
    site.fill()
    output = site.run(
        DEFINITIONS
        + _IMPORT
        + """
from sharded_orm.operations.imports.row_copy import _CopyJob
work = _CopyJob.work
appeared = []
def work_then_write(self, unit, stopping):
    result = work(self, unit, stopping)
    if not appeared and unit.content["table"] == 0 and unit.content["last"] is not None:
        appeared.append(1)
        insert(Book, [book(-1), book(100), book(101, sequel_of_id=-1, writer_id=8)])
    return result
_CopyJob.work = work_then_write
print(copy("--rows", "10"), bool(appeared))
"""
    )
    assert output == "ok True"
    assert site.ids() == [-1, *range(1, 41), 100, 101]
    site.copy("--verify", models=["library.Book", "library.Topic"])


def test_a_row_whose_parent_vanishes_is_named(site: Site) -> None:
    site.fill()
    site.run("execute('default', 'UPDATE library_book SET sequel_of_id = 15 WHERE id = 7')")
    output = site.run(
        _IMPORT
        + """
from sharded_orm.operations.imports import row_copy
check = row_copy.check_import
def check_then_delete(request):
    check(request)
    with connections["default"].constraint_checks_disabled():
        execute("default", "DELETE FROM library_book WHERE id = 15")
row_copy.check_import = check_then_delete
print(copy())
"""
    )
    assert (
        "1 rows refer to rows that their shard does not have (library.Book(pk=7) refers" in output
    )
    assert "'sequel_of' to library.Book(id=15)" in output
