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
from sharded_orm.operations.imports.row_storage import ShardTable, Stored
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
from sharded_orm.operations.imports.row_storage import ShardTable
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
    with unchecked("default"):
        execute("default", "DELETE FROM library_book WHERE id = 15")
row_copy.check_import = check_then_delete
print(copy())
"""
    )
    assert (
        "1 rows refer to rows that their shard does not have (library.Book(pk=7) refers" in output
    )
    assert "'sequel_of' to library.Book(id=15)" in output


def test_a_leader_that_was_taken_over_changes_no_units(site: Site) -> None:
    """A leader is silent for too long, and wakes up while it cuts the second round."""
    site.fill()
    output = site.run(
        _IMPORT
        + """
from sharded_orm.models import OperationStep
from sharded_orm.operations.imports.row_copy import _CopyJob
from sharded_orm.operations.runs import lease
from sharded_orm.operations.runs.farm import Farm
def take_over():
    lease.runs().filter(kind="import", unfinished=True).update(token="of another process")
def names():
    steps = OperationStep.objects.filter(run__kind="import").order_by("alias")
    return sorted({name[:4] for name in steps.values_list("alias", flat=True)})
def forget():
    lease.runs().filter(kind="import").delete()
plan, ranges = Farm._plan, _CopyJob.plan
def plan_late(self, run, number):
    if number == 2:
        take_over()
    plan(self, run, number)
Farm._plan = plan_late
print("was taken over" in copy(), names())
forget()
for alias in [alias for alias in connections if alias.startswith("books_0")]:
    execute(alias, "DELETE FROM library_book")
Farm._plan = plan
def ranges_late(self, number):
    if number == 2:
        take_over()
    return ranges(self, number)
_CopyJob.plan = ranges_late
print("was taken over" in copy(), names())
"""
    )
    # The units of the first round are left to the process that has taken over.
    assert output.splitlines()[0] == "True ['0001']"
    assert "0002" not in output.splitlines()[1]


def test_the_run_that_another_process_has_begun_is_kept(site: Site) -> None:
    """A process finds, instead of the run in which it took part, the next one."""
    site.fill()
    output = site.run(
        _IMPORT
        + """
from sharded_orm.operations.runs import lease
from sharded_orm.operations.runs.farm import Farm
report, work = Farm._finished_report, Farm._work
begun = []
def stop(self, worker):
    self._stopping.stop("stopped")
    return False
def report_then_wait(self):
    found = report(self)
    if found is None and not begun:
        begun.append(copy())
        Farm._work = stop
        begun.append(copy())
        Farm._work = work
    return found
Farm._finished_report = report_then_wait
result = copy()
runs = lease.runs().filter(kind="import").order_by("pk").values_list("state", flat=True)
print(result, begun[0], list(runs))
"""
    )
    assert output == "ok ok ['done', 'running']"
    site.copy(models=["library.Book", "library.Topic"])


def test_the_order_of_a_model_leaves_no_row_out(site: Site) -> None:
    """On the shard, the row of the other table is missing, by which rows are ordered."""
    site.fill()
    site.run(DEFINITIONS + "insert(Review, [{'book_id': 15, 'number': 1, 'writer_id': 8}])")
    output = site.run(
        _IMPORT
        + """
from sharded_orm.operations.imports import row_copy
Review._meta.ordering = ["book__title"]
check = row_copy.check_import
def check_then_delete(request):
    check(request)
    with unchecked("default"):
        execute("default", "DELETE FROM library_book WHERE id = 15")
row_copy.check_import = check_then_delete
print(copy("library.Review"))
"""
    )
    assert "library.Review(pk=(8, 1)) refers by 'book' to library.Book(id=15)" in output


def test_another_import_does_not_give_up_one_that_is_between_two_units(site: Site) -> None:
    site.fill()
    output = site.run(
        _IMPORT
        + """
from sharded_orm.operations.runs.farm import Farm
work, others = Farm._work, []
def work_after_another(self, worker):
    Farm._work = work
    try:
        call_command("shards", "import", "library.Counted", source="default", verbosity=0)
    except CommandError as exc:
        others.append(str(exc))
    return work(self, worker)
Farm._work = work_after_another
print(copy(), others)
"""
    )
    assert output.startswith("ok ["), output
    assert "is under way with other arguments" in output
