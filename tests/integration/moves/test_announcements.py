"""Announcements of moves are made one after the other, also the first ones of all."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.imports.site import PREAMBLE
from tests.integration.moves.site import MOVER, Site
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

_TOGETHER = """
import time
from pathlib import Path
from sharded_orm.exceptions import MoveRefused
folder = Path({folder!r})
def wait_for(is_there):
    while not is_there():
        time.sleep(0.01)
plan = plan_moves("books", [{key}], 1)
(folder / "ready {me}").touch()
wait_for(lambda: len(list(folder.glob("ready *"))) == 2)
{before}
try:
    result = [move.number for move in record.announce("books", plan.keys, moves.MoveOptions().keep)]
except MoveRefused as error:
    result = str(error)
{after}
print(json.dumps(result))
"""
#: Both processes have begun their transactions, if they can at the same time. The first one inserts
#: its row before the second one does, and commits when the second one is done, or waits.
_FIRST = """
from django.db.models import QuerySet
WAITING = (
    "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND time_ms > 50"
    " AND info LIKE '%%sharded_orm_key_move%%' AND info NOT LIKE '%%processlist%%'"
    if connections["directory"].vendor == "mysql" else
    "SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND pid IN"
    " (SELECT pid FROM pg_stat_activity WHERE datname = current_database())"
)
def wait_for_second(what):
    wait_for(lambda: (folder / what).exists() or execute("directory", WAITING)[0][0])
insert = QuerySet.bulk_create
def bulk_create(self, rows, **options):
    if rows[0].group != "books":
        return insert(self, rows, **options)
    (folder / "first began").touch()
    wait_for_second("second began")
    created = insert(self, rows, **options)
    (folder / "first inserted").touch()
    wait_for_second("second done")
    return created
QuerySet.bulk_create = bulk_create
"""
_SECOND = """
from django.db.models import QuerySet
insert = QuerySet.bulk_create
def bulk_create(self, rows, **options):
    if rows[0].group == "books":
        (folder / "second began").touch()
        wait_for((folder / "first inserted").exists)
    return insert(self, rows, **options)
QuerySet.bulk_create = bulk_create
wait_for((folder / "first began").exists)
"""
#: What everybody sees when the second announcement is there.
_LOOK = """
result = list(KeyMove.objects.using("directory").filter(group="books").values_list("pk", flat=True))
(folder / "second done").touch()
"""


def started(
    site: Site, folder: Path, me: int, key: int, before: str = "", after: str = ""
) -> PythonProcess:
    program = _TOGETHER.format(folder=str(folder), me=me, key=key, before=before, after=after)
    return site.start("run", PREAMBLE + MOVER + program)


def said(process: PythonProcess) -> object:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return json.loads(out)


def test_one_of_two_processes_announces_a_key(site: Site, tmp_path: Path) -> None:
    processes = [started(site, tmp_path, me, 3) for me in (1, 2)]
    results = [said(process) for process in processes]
    assert sum(isinstance(result, list) for result in results) == 1, results
    assert sum("another process moves '3'" in str(result) for result in results) == 1, results


def test_numbers_of_moves_become_visible_in_their_order(site: Site, tmp_path: Path) -> None:
    """Whoever has seen a number asks for larger ones only."""
    if site.backend == "sqlite3":
        processes = [started(site, tmp_path, key, key) for key in (3, 7)]
        assert all(isinstance(said(process), list) for process in processes)
        return
    first = started(site, tmp_path, 1, 3, _FIRST)
    second = started(site, tmp_path, 2, 7, _SECOND, _LOOK)
    (number,), seen = said(first), said(second)  # type: ignore[misc, has-type]
    assert number in seen  # type: ignore[operator]
