"""A writer is paused between its commit and its index row, and others change and clean the entity.

The row that it writes then is stale. Its mark must be seen, whatever others do at the same moment.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.entities.site import PREAMBLE, Site
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

#: Pauses before a call of a function until a file exists. Says so by another file.
_PAUSE = """
import os, time
def pause_before(module, name, path):
    function = getattr(module, name)
    def paused(*arguments):
        setattr(module, name, function)
        open(path, "w").close()
        while not os.path.exists(path + ".go"):
            time.sleep(0.01)
        return function(*arguments)
    setattr(module, name, paused)
"""
_WRITER = """
from sharded_orm.contrib.entities import index_rows
index_rows.FOLLOW_TIME = 0
pause_before(index_rows, "insert", {path!r})
feed.put(Entity(user_id=1, id=uuid.UUID(int=1)))
"""
_CLEANER = """
from sharded_orm.contrib.entities import cleaner
pause_before(cleaner, "take_off_marks", {path!r})
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
"""
_SECOND_WRITER = """
class Program:
    def put(self):
        return feed.put(e)
program = Program()
e = feed.get(uuid.UUID(int=1))
e["user_id"] = 3
pause_before(program, "put", {path!r})
program.put()
"""
_EDIT = """
with feed.edit(uuid.UUID(int=1)) as e:
    e["user_id"] = 2
"""
CLEAN = """
from sharded_orm.contrib.entities import cleaner
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
"""


@pytest.mark.parametrize(
    ("before", "other"),
    [(_EDIT, _CLEANER), (_EDIT + CLEAN, _SECOND_WRITER)],
    ids=["cleaner", "writer"],
)
def test_the_mark_of_a_late_row_is_not_lost(
    site: Site, tmp_path: Path, before: str, other: str
) -> None:
    """The other process has read the entity before that mark, and writes it afterwards."""
    with ExitStack() as ending:

        def start(code: str, name: str) -> PythonProcess:
            path = tmp_path / name
            process = site.start("run", PREAMBLE + _PAUSE + code.format(path=str(path)))
            ending.callback(process.kill)
            site.wait_for(path, [process])
            return process

        def finish(process: PythonProcess, name: str) -> None:
            (tmp_path / f"{name}.go").touch()
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err

        writer = start(_WRITER, "writer")
        site.run(before)
        second = start(other, "second")
        finish(writer, "writer")
        finish(second, "second")
    is_stale = "by_user.model.objects.filter(user_id=1).exists()"
    out = site.run(f"print({is_stale})\n{CLEAN}\nprint(differences(), marks())")
    assert out.splitlines() == ["True", "[] 0"]


def test_the_rows_of_former_versions_are_noted_once(site_everywhere: Site) -> None:
    """Without a cleaner, an entity that changes all the time would grow beyond what a database takes."""
    out = site_everywhere.run("""
def noted():
    return len(feed.model.objects.filter(id=e.id).values_list("pending", flat=True).get().splitlines())
e = feed.put(entry(0, "a"))
for n in range(12):
    e["user_id"], e["link"] = (n + 1) % 3, "aA"[n % 2]
    feed.put(e)
print(noted())
from sharded_orm.contrib.entities import cleaner
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
print(differences(), marks())
""")
    assert out.splitlines() == ["5", "[] 0"]


#: Prints how many characters each change of an entity sends.
_SIZES = """
from django.db.backends.utils import CursorWrapper
wrapped = CursorWrapper.execute
def execute(self, sql, params=None):
    if sql.startswith("UPDATE") and "feeds_feed_entities" in sql:
        print(len(sql) + sum(len(str(p)) for p in params or ()) < 2000)
    return wrapped(self, sql, params)
CursorWrapper.execute = execute
"""


def test_the_cleaner_does_not_send_the_notes_back(site: Site) -> None:
    """After a day without a cleaner, those of 900 entities may be more than a server takes in a packet."""
    out = site.run(f"""
e = feed.put(entry(0, "a"))
for n in range(200):
    e["link"] = f"{{n}}"
    feed.put(e)
{_SIZES}
{CLEAN}
print(differences(), marks())
""")
    assert out.splitlines() == ["True", "[] 0"]


def test_notes_that_are_full_refuse_writes_until_the_cleaner_came(site_everywhere: Site) -> None:
    """MariaDB would replace notes beyond its packet size by NULL, and the stale rows would stay."""
    out = site_everywhere.run("""
from sharded_orm.contrib.entities.exceptions import EntityChanged, FormerRowsFull
e = feed.put(entry(0, "a"))
e["link"] = "b"
feed.put(e)
row = feed.model.objects.filter(id=e.id)
notes = row.values_list("pending", flat=True).get()
row.update(pending='["index_gone",["x"]]\\n' * 25_000 + notes)
stale = feed.get(e.id)
def refused(write, *arguments):
    try:
        write(*arguments)
    except FormerRowsFull as exc:
        return str(e.id) in str(exc) and "entities clean" in str(exc)
e["link"] = "c"
print(refused(feed.put, e), refused(feed.delete, e.id), feed.get(e.id)["link"])
e["link"], e["title"] = "b", "changed without a change of index rows"
feed.put(e)
stale["link"] = "d"
try:
    feed.put(stale)
except EntityChanged:
    print("changed")
from sharded_orm.contrib.entities import cleaner
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
e["link"] = "c"
feed.put(e)
feed.delete(e.id)
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
print(differences(), marks())
""")
    assert out.splitlines() == ["True True b", "changed", "[] 0"]


def test_notes_in_the_former_form_are_read(site_everywhere: Site) -> None:
    """Before, ``pending`` was one JSON object. Writers append lines to it that it does not contain."""
    out = site_everywhere.run("""
import json
entities = [feed.put(entry(5, "a")) for _ in range(2)]
for e in entities:
    e["user_id"] = 6
    feed.put(e)
    notes = {"index_user": [[5]], "index_gone": [["x"]]}
    feed.model.objects.filter(id=e.id).update(pending=json.dumps(notes, separators=(",", ":")))
entities[0]["user_id"] = 7
feed.put(entities[0])
print(len(differences()))
from sharded_orm.contrib.entities import cleaner
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
print(differences(), marks())
""")
    assert out.splitlines() == ["3", "[] 0"]


def test_damaged_notes_are_named_and_the_rest_is_cleaned(site: Site) -> None:
    out = site.run("""
entities = [feed.put(entry(5, "a")) for _ in range(2)]
for e in entities:
    e["user_id"] = 6
    feed.put(e)
feed.model.objects.filter(id=entities[0].id).update(pending='["index_user",')
from sharded_orm.contrib.entities import cleaner
report = cleaner.CleanReport()
cleaner.clean_marked(report, min_age=0)
print(len(report.damaged), str(entities[0].id) in report.damaged[0], len(differences()), marks())
""")
    assert out == "1 True 1 1"


def test_notes_of_a_former_declaration_are_left_out(site: Site) -> None:
    """An index of this name had other properties, and another table."""
    out = site.run("""
e = feed.put(entry(5, "a"))
e["user_id"] = 6
feed.put(e)
notes = feed.model.objects.filter(id=e.id)
former = '["index_user",["ada"]]\\n["index_user",[1,2]]\\n'
notes.update(pending=former + notes.values_list("pending", flat=True).get())
from sharded_orm.contrib.entities import cleaner
report = cleaner.CleanReport()
cleaner.clean_marked(report, min_age=0)
print(report.settled, report.damaged, differences(), marks())
""")
    assert out == "1 [] [] 0"
