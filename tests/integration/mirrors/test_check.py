"""``mirrors check`` finds what a mirror does not have in common with its source, and mends it."""

from __future__ import annotations

import pytest

from tests.integration.mirrors.site import Site

#: Raw SQL, which no mirror follows.
_CHANGES = """
def execute(alias, sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
for number in range(6):
    note(number % 3 + 1, 4 + number, f"text {number}")
pks = dict((text, pk) for pk, text in rows(WrittenNote, "pk", "text"))
execute("books_00001", f"UPDATE notes_note SET text = 'newer' WHERE note_id = {pks['text 0']}")
execute("books_00002", f"DELETE FROM notes_note WHERE note_id = {pks['text 1']}")
execute("books_00003", f"UPDATE notes_note SET author_id = 1 WHERE note_id = {pks['text 2']}")
for alias in aliases("books"):
    execute(alias, f"DELETE FROM notes_writtennote WHERE note_id = {pks['text 3']}")
execute("books_00002", f"UPDATE notes_note SET is_public = '0' WHERE note_id = {pks['text 4']}")
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--newest-first"],
        pytest.param([], marks=pytest.mark.long),
        pytest.param(["--sample", "100"], marks=pytest.mark.long),
    ],
)
def test_differences_are_found_and_mended(site: Site, options: list[str]) -> None:
    site.run(_CHANGES)
    done = site.manage("mirrors", "check", *options, code=1)
    lines = [line for line in done.out.splitlines() if line.startswith("notes.WrittenNote(")]
    assert sorted(line.rpartition(" ")[2] for line in lines) == [
        "misplaced",  # text 2, with its former author
        "missing",  # text 2, with its author
        "missing",  # text 3
        "orphaned",  # text 1
        "stale",  # text 0
    ]
    lines = [line for line in done.out.splitlines() if line.startswith("notes.PublicNote(")]
    assert sorted(line.rpartition(" ")[2] for line in lines) == ["misplaced", "orphaned", "stale"]
    site.manage("mirrors", "check", "--repair", *options)
    assert site.run("print(differences())") == "[]"
    site.manage("mirrors", "check", *options)
    # The mirrors follow the rows as before.
    site.run("Note.objects.scatter().update(text='later')")
    assert site.run("print(differences())") == "[]"


def test_the_null_of_json_is_not_that_of_sql(site: Site) -> None:
    out = site.run("""
from django.core.management import call_command
from django.db.models import JSONField, Value
JSON_NULL = Value(None, JSONField())
def counts():
    stored = TopicOfNote.objects.scatter().filter(data__isnull=False)
    print(list(stored.values_list("data", flat=True)).count(None), len(stored))
first = note(1, 4)
for data in (None, JSON_NULL, {"a": None}):
    topic = Topic.objects.create(owner_id=1, name="t")
    last = NoteTopic.objects.create(owner_id=1, note=first, topic=topic, data=data)
counts()
NoteTopic.objects.filter(pk=last.pk, owner_id=1).update(data=JSON_NULL)
counts()
call_command("mirrors", "check", "notes.TopicOfNote", verbosity=0)
for alias in aliases("accounts"):
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE notes_topicofnote SET data = NULL")
call_command("mirrors", "check", "notes.TopicOfNote", "--repair", verbosity=0)
counts()
""")
    lines = out.splitlines()
    assert [line for line in lines if line[0].isdigit()] == ["1 2", "2 2", "2 2"]
    assert sum(line.endswith(": repaired") for line in lines) == 2


def test_each_row_is_in_a_chunk(site: Site) -> None:
    out = site.run("""
from sharded_orm.contrib.mirrors import comparison
from sharded_orm.contrib.mirrors.build import find_mirror
for number in range(40):
    note(number % 3 + 1, number % 7 + 2, str(number))
for alias in aliases("books"):
    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM notes_note WHERE text LIKE '1%'")
        cursor.execute("DELETE FROM notes_writtennote WHERE text LIKE '3%'")
        cursor.execute("DELETE FROM notes_verifiednote")
comparison.CHUNK = comparison.FROM_SHARD = 2
for newest_first in (False, True):
    for name in ("WrittenNote", "VerifiedNote"):
        chunks = list(comparison.compare(find_mirror(name), newest_first=newest_first))
        report = chunks[-1]
        print(len(chunks) > 2, report.compared, sorted(report.counts.items()))
""")
    # 11 texts begin with 1, and 11 with 3.
    written = "True 58 [(<Kind.MISSING: 'missing'>, 11), (<Kind.ORPHANED: 'orphaned'>, 11)]"
    verified = "True 29 [(<Kind.MISSING: 'missing'>, 29)]"
    assert out.splitlines() == [written, verified] * 2


def test_what_a_relay_will_deliver_is_no_difference(site: Site) -> None:
    site.run("""
from sharded_orm.contrib.mirrors import capture
n = note()
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
n.delete()
note(3, 4)
""")
    done = site.manage("mirrors", "check", "notes.WrittenNote")
    assert "0 differ, 2 not delivered yet" in done.out
    status = site.manage("mirrors", "status", "--json").json
    assert (status["rows"], status["dead"]) == (3, [])
    assert status["lag"] > 0


def test_a_source_from_a_backup_counts_from_an_earlier_number(site: Site) -> None:
    out = site.run("""
n = note()
for alias in aliases("books"):
    # The numbers of the outbox begin again, while the mirrors have the versions from before.
    QuerySet(RowVersion, using=alias).update(version=F("version") + 100000)
Note.objects.filter(owner_id=1).update(text="new")
print(rows(WrittenNote, "text"))
""")
    assert out == "[('text',)]"
    site.run("for a in aliases('books'): QuerySet(OutboxRow, using=a)._raw_delete(a)")
    site.manage("mirrors", "check", "--repair", "WrittenNote")
    out = site.run("""
print(rows(WrittenNote, "text"))
Note.objects.filter(owner_id=1).update(text="newer")
print(rows(WrittenNote, "text"))
""")
    assert out.splitlines() == ["[('new',)]", "[('newer',)]"]


def test_build_fills_a_new_mirror(site: Site) -> None:
    site.run("""
for number in range(7):
    note(number % 4 + 1, number % 3 + 5, str(number))
for alias in aliases("books"):
    # As before the mirror was there; but one row was written since.
    QuerySet(RowVersion, using=alias)._raw_delete(alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM notes_writtennote")
Note.objects.filter(owner_id=1, text="0").update(text="since")
""")
    site.manage("mirrors", "build", "notes.WrittenNote")
    assert site.run("print(len(rows(WrittenNote, 'pk')), differences())") == "7 []"
    site.manage("mirrors", "build", "notes.WrittenNote")
    assert site.run("print(differences())") == "[]"


def test_unknown_mirrors(site: Site) -> None:
    done = site.manage("mirrors", "build", "Note", code=1)
    assert "No mirror has the name 'Note'" in done.err
    assert "['notes.PublicNote', 'notes.TopicOfNote', 'notes.VerifiedNote'," in done.err


def test_a_repair_gets_its_number_after_open_writes_of_the_row(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
import threading
from sharded_orm.contrib.mirrors.build import find_mirror
from sharded_orm.contrib.mirrors.differences import _record
from sharded_orm.contrib.mirrors.outbox import WrittenRow
n, source = note(), find_mirror("WrittenNote").source
locked, order = threading.Event(), []
def write():
    with transaction.atomic(using="books_00001"):
        Note.objects.filter(owner_id=1).update(text="first")
        locked.set()
        repair.join(0.5)
        order.append("write")
    connections.close_all()
def record():
    locked.wait()
    _record(source, WrittenRow(n.pk, 1, {}, 0))
    order.append("repair")
    print(_record(source, WrittenRow(n.pk + 1, 1, {}, 0)))
    connections.close_all()
writer, repair = threading.Thread(target=write), threading.Thread(target=record)
repair.start(), writer.start()
writer.join(), repair.join()
print(order)
""")
    assert out.splitlines() == ["None", "['write', 'repair']"]
