"""A move back brings along what was written in the switch and after it.

No reverse copy has to be armed before the switch: the way back is a move as any other, which copies and
compares what the key has by then. A way back that brings the old rows only is caught.
"""

from __future__ import annotations

import pytest

from tests.integration.moves.site import MOVER, WRITER, Site

#: Runs before the code of a test: writes at three moments of a move, and a copier that leaves them out.
WRITES = """
import threading
waits, threads = threading.Event(), []

def in_thread(number):
    def work():
        try:
            write(number)
        finally:
            connections.close_all()
    threads.append(threading.Thread(target=work))
    threads[-1].start()

def write_in_the_switch(*ignored):
    in_thread(0)
    assert waits.wait(60), "nothing has stopped the write"

def write_after_the_switch(*ignored):
    in_thread(1)

def wait_and_write_later():
    for thread in threads:
        thread.join()
    write(2)

def forgetful(store, column, position):
    # :param position: that of the rows among the arguments.
    def forgetful_store(self, table, *args):
        names = [each.name for each in self.columns(table)]
        if column in names:
            index, args = names.index(column), list(args)
            args[position] = [row for row in args[position] if int(row[index]) < 10**6]
        store(self, table, *args)
    return forgetful_store
"""
#: The move there, and two ways back.
_THERE = """
from sharded_orm.models.moves import repetition
def write(number):
    Topic.objects.create(id=10**6 + number, writer_id=3, name="new")
    Topic.objects.filter(writer_id=3, pk=300).update(name=f"changed {number}")
    Topic.objects.filter(writer_id=3, pk=400 + number).delete()

Topic.objects.bulk_create(Topic(id=400 + n, writer_id=3, name="old") for n in range(3))
before(repetition, "_wait_for_switch", lambda *ignored: waits.set())
before(MoveRecord, "switch", write_in_the_switch)
after(MoveRecord, "switch", write_after_the_switch)
print(list(moves.move_keys("books", [3], 1).moved.values()))
wait_and_write_later()
"""
_BACK = """
RowCopy.put = forgetful(RowCopy.put, "id", 1)
if not {guarded}:
    key_mover.differences = lambda *ignored: (0, [])
report = moves.move_keys("books", [3], 3)
print(list(report.moved.values()), "the copy differs" in str(report.failures))
"""
_COMPLETE = """
topics = Topic.objects.filter(writer_id=3)
print(
    list(topics.filter(pk__gte=10**6).order_by("pk").values_list("pk", flat=True)),
    topics.get(pk=300).name,
    topics.filter(pk__in=[400, 401, 402]).count(),
)
"""
COMPLETE = "[1000000, 1000001, 1000002] changed 2 0"


@pytest.mark.long_on("sqlite")
def test_a_move_back_brings_along_what_was_written_since(site: Site) -> None:
    site.content["sharded_orm"]["MOVE_WAIT"] = 60
    site.save()
    assert site.run(MOVER + WRITES + _THERE) == "[1]"
    # A copy that leaves these rows out is refused, and nothing is lost.
    assert site.run(MOVER + WRITES + _BACK.format(guarded=True)) == "[] True"
    assert site.run(_COMPLETE) == COMPLETE
    site.move(str(WRITER), "--to", "3")
    assert site.run(_COMPLETE) == COMPLETE
    # Without the comparison, they are lost.
    site.move(str(WRITER), "--to", "1")
    assert site.run(MOVER + WRITES + _BACK.format(guarded=False)) == "[3] False"
    assert site.run(_COMPLETE) == "[] changed 2 0"
