"""Most rows of a key are on the target before writes of the key begin to wait: nobody sees them there."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.imports.site import PREAMBLE
from tests.integration.moves.site import MOVER, WRITER, Site
from tests.patience import PATIENCE

#: Counts on the target, and what the application sees, while the rows are on both shards.
_LOOK = """
def look(*ignored):
    tables = [m._meta.db_table for m in (Topic, Book, Review, Novel)]
    print([execute("books_00001", f"SELECT COUNT(*) FROM {table}")[0][0] > 0 for table in tables])
    print(Topic.objects.scatter().filter(writer_id__in=[3]).count(), Topic.objects.scatter().count())
    print(Topic.objects.filter(writer_id=3).count(), Novel.objects.scatter().filter(writer_id__in=[3]).count())
"""
#: The application writes every kind of row while they are.
_WRITE = """
def write(*ignored):
    book, other = Book.objects.filter(writer_id=3).order_by("pk")[:2]
    book.title, book.cover = "changed", b"changed"
    book.save()
    other.topics.clear()
    new = Topic.objects.create(id=977, writer_id=3, name="new")
    book.topics.add(new)
    Review.objects.filter(writer_id=3, book=other).delete()
    Novel.objects.filter(writer_id=3).update(genre="changed")
    novel = Novel.objects.create(writer_id=3, title="another novel", genre="new")
    novel.topics.set([new])
    Topic.objects.filter(writer_id=3, name="topic 0 of 3").delete()
"""


def test_rows_are_seen_once_while_they_are_on_both_shards(site: Site) -> None:
    before = site.rows()
    said = site.run(
        f"{MOVER}{_LOOK}look()\n"
        'after(RowCopy, "publish", look)\n'
        'print(moves.move_keys("books", [3], 1).moved)'
    ).splitlines()
    # Tables that have the shard key are published, that of the child model is not.
    assert said[0] == "[True, True, True, True]"  # Another key has rows there.
    assert said[1:3] == said[4:6]
    assert said[6] == "{'3': 1}"
    assert site.rows() == before


def test_what_is_written_meanwhile_arrives(site: Site) -> None:
    rows = "def see(*args): print(json.dumps(str(rows_of(3))))\n"
    from tests.integration.moves.site import _ROWS

    said = site.run(
        MOVER
        + _ROWS
        + _WRITE
        + rows
        + 'after(RowCopy, "publish", write)\nafter(ChangeCapture, "close", see)\n'
        + "for kind in ChangeCapture.__subclasses__(): after(kind, 'close', see)\n"
        + 'print(moves.move_keys("books", [3], 1).moved)'
    ).splitlines()
    assert said[-1] == "{'3': 1}"
    assert "another novel" in said[0]
    assert json.loads(said[0]) == site.rows()
    assert {shard for shard, count in site.counts().items() if count} == {1}


def test_a_move_that_is_given_up_then_leaves_nothing(site: Site) -> None:
    before = site.rows()
    report = json.loads(
        site.run(
            f"""{MOVER}
def fail(*args, **kwargs):
    raise MoveFailed("given up")
before(RowCopy, "complete", fail)
print(json.dumps(moves.move_keys("books", [3], 1).to_json()))
"""
        )
    )
    assert report["failures"] == {"3": "given up"}
    assert site.place() == WRITER
    assert site.rows() == before
    assert site.left() == ""
    assert {shard for shard, count in site.counts().items() if count} == {3}


def test_the_switch_is_tried_again_after_a_transaction_on_the_key(site: Site) -> None:
    """The rows are published already. What the transaction has written is there after the move."""
    said = site.run(
        f"""{MOVER}
options = moves.MoveOptions(max_pause=0.2)
other = ShardSessions("books").capture(3)
other._connection.inc_thread_sharing()
def begin(*ignored):
    other._rows("BEGIN")
    other._rows("UPDATE library_topic SET name = 'in a transaction' WHERE writer_id = 3")
def commit(self, number):
    other._rows("COMMIT")
after(RowCopy, "publish", begin)
before(ChangeCapture, "reopen", commit)
print(moves.move_keys("books", [3], 1, options=options).moved)
print(set(Topic.objects.filter(writer_id=3).values_list("name", flat=True)))
"""
    )
    assert said.splitlines() == ["{'3': 1}", "{'in a transaction'}"]


def test_the_switch_is_tried_again_if_its_time_is_over_when_all_is_published(site: Site) -> None:
    """What the first attempt has published must not be in the way of the second."""
    before = site.rows()
    said = site.run(
        f"""{MOVER}
import time
clock, late = time.monotonic, [0.0]
time.monotonic = lambda: clock() + late[0]
def be_late(*ignored):
    late[0] += 10.0
before(KeyMover, "_switch_once", lambda *ignored: after(RowCopy, "complete", be_late))
report = moves.move_keys("books", [3], 1)
print(report.moved, report.failures, late)
"""
    )
    assert said.strip() == "{'3': 1} {} [10.0]"
    assert site.rows() == before
    assert {shard for shard, count in site.counts().items() if count} == {1}


_COUNTER = """
import os
from django.db.models import F
from sharded_orm import uncached
counts, wrong = [0, 0], 0
while not os.path.exists({stop!r}):
    turn = sum(counts) % 2
    book = Book.objects.filter(writer_id=3).order_by("pk")
    counts[turn] += book.filter(pk=book[turn].pk).update(pages=F("pages") + 1)
    with uncached():
        wrong += book.values_list("pages", flat=True)[turn] != counts[turn]
print(json.dumps([*counts, wrong]))
"""


def test_a_move_back_right_after_a_move_loses_no_write(site: Site, tmp_path: Path) -> None:
    """There is no other way back: what was written on the new shard moves back with the rest."""
    site.run("Book.objects.filter(writer_id=3).update(pages=0)")
    stop = tmp_path / "stop"
    counter = site.start("run", PREAMBLE + _COUNTER.format(stop=str(stop)))
    try:
        site.run(
            f"{MOVER}for target in (1, 3, 1, 3): assert moves.move_keys('books', [3], target).ok"
        )
    finally:
        stop.touch()
        out, err = counter.communicate(timeout=PATIENCE)
    assert counter.returncode == 0, err
    *counts, wrong = json.loads(out)
    assert all(counts)
    assert wrong == 0
    pages = "Book.objects.filter(writer_id=3).order_by('pk').values_list('pages', flat=True)[:2]"
    assert json.loads(site.run(f"print(list({pages}))")) == counts
    assert site.place() == WRITER
