"""Each guard of a move is needed: the same events harm rows, or show old ones, if it is taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.imports.site import PREAMBLE
from tests.integration.moves.site import MOVER, WRITER, Site
from tests.patience import PATIENCE

WITH_AND_WITHOUT = pytest.mark.parametrize("guarded", [True, False], ids=["with it", "without it"])
#: Another program writes the key to its shard when the mover believes that the copy is complete.
_LATE_WRITE = """
acknowledged = []
def write(*ignored):
    try:
        execute("books_00003", "INSERT INTO library_topic (id, writer_id, name) VALUES (5, 3, 'late')")
        acknowledged.append(5)
    except Exception as error:
        print("refused:", "has moved there" in str(error))
before(MoveRecord, "switch", write)
if not {guarded}:
    for kind in (ChangeCapture, *ChangeCapture.__subclasses__()):
        kind.close = lambda *ignored: None
print(list(moves.move_keys("books", [3], 1).moved.values()))
print("lost:", [pk for pk in acknowledged if not Topic.objects.filter(writer_id=3, pk=pk).exists()])
"""
#: A process that has read the key, and reads it again after a move.
_LATE_READ = """
from sharded_orm import runtime, uncached
from sharded_orm.routing.placement_lease import PermanentLease
if not {guarded}:
    runtime.strategy("books").lease = PermanentLease()
with uncached():
    before = Topic.objects.filter(writer_id=3).count()
    open({fifo!r}).read()
    print(Topic.objects.filter(writer_id=3).count() == before > 0)
"""
#: The copier forgets a row to which no other one refers.
_FORGETFUL = """
put = RowCopy.put
def forgetful(self, table, number, rows):
    put(self, table, number, rows[1:] if table.name == "library_review" else rows)
RowCopy.put = forgetful
if not {guarded}:
    key_mover.differences = lambda *ignored: (0, [])
count = Review.objects.filter(writer_id=3).count()
report = moves.move_keys("books", [3], 1)
print(list(report.moved.values()), Review.objects.filter(writer_id=3).count() - count)
"""


def _run(site: Site, program: str, *, guarded: bool) -> list[str]:
    return site.run(MOVER + program.format(guarded=guarded)).splitlines()


@WITH_AND_WITHOUT
def test_the_fence(site: Site, guarded: bool) -> None:
    expected = ["refused: True", "[1]", "lost: []"] if guarded else ["[1]", "lost: [5]"]
    assert _run(site, _LATE_WRITE, guarded=guarded) == expected


@WITH_AND_WITHOUT
def test_the_lease(site: Site, tmp_path: Path, guarded: bool) -> None:
    fifo = tmp_path / "is_moved"
    os.mkfifo(fifo)
    reader = site.start("run", PREAMBLE + _LATE_READ.format(guarded=guarded, fifo=str(fifo)))
    with fifo.open("w"):
        site.move(str(WRITER), "--to", "1", "--keep", "0")
    out, err = reader.communicate(timeout=PATIENCE)
    assert reader.returncode == 0, err
    assert out.strip() == str(guarded)


@WITH_AND_WITHOUT
def test_the_comparison(site: Site, guarded: bool) -> None:
    expected = ["[] 0"] if guarded else ["[1] -1"]
    assert _run(site, _FORGETFUL, guarded=guarded) == expected
