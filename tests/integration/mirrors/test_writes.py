"""Every write of the ORM to a source reaches its mirrors."""

from __future__ import annotations

import pytest

from tests.integration.mirrors.site import Site

#: What is done to the notes, and the texts that the mirror has afterwards, by author.
WRITES = {
    "create": ("note(1, 2, 'a')", [(2, "a")]),
    "save": ("n = note(); n.text = 'b'; n.save()", [(2, "b")]),
    "save of some fields": ("n = note(); n.text = 'b'; n.save(update_fields=['text'])", [(2, "b")]),
    "save of an expression": ("n = note(); n.price = F('price') + 3; n.save()\nassert WrittenNote.objects.get(author_id=2).price == 3", [(2, "text")]),
    "another author": ("n = note(); n.author_id = 3; n.save()", [(3, "text")]),
    "another author on the same shard": ("n = note(); n.author_id = 6; n.save()", [(6, "text")]),
    "there and back": ("n = note(); n.author_id = 3; n.save(); n.author_id = 2; n.save()", [(2, "text")]),
    "no author any more": ("n = note(); n.author_id = None; n.save()", []),
    "an author only now": ("n = note(author=None); n.author_id = 5; n.save()", [(5, "text")]),
    "a new key": ("note(author=4711)", [(4711, "text")]),
    "delete": ("note().delete()", []),
    "delete and create": ("n = note(); pk = n.pk; n.delete(); note(note_id=pk, text='again')", [(2, "again")]),
    "delete of a queryset": ("note(); note(); Note.objects.filter(owner_id=1).delete()", []),
    "raw delete": ("note(); Note.objects.filter(owner_id=1)._raw_delete('books_00001')", []),
    "cascade": ("n = note(); note(text='reply', answers=n); n.delete()", []),
    "update": ("note(); note(author=3); Note.objects.filter(owner_id=1).update(text='u')", [(2, "u"), (3, "u")]),
    "update of the author": ("note(); note(author=3); Note.objects.filter(owner_id=1).update(author_id=5)", [(5, "text")] * 2),
    "update by a join": ("n = note(); note(text='r', answers=n); Note.objects.filter(owner_id=1, answers__text='text').update(text='u')", [(2, "text"), (2, "u")]),
    "update of nothing": ("note(); Note.objects.filter(owner_id=1, text='other').update(text='u')", [(2, "text")]),
    "update of no id": ("note(); Note.objects.filter(owner_id=1, pk__in=[]).update(text='u')", [(2, "text")]),
    "update on all shards": ("note(); note(4, 4); Note.objects.scatter().update(text=F('text'), price=7)", [(2, "text"), (4, "text")]),
    "bulk_create": ("Note.objects.bulk_create(Note(owner_id=o, author_id=5, text=str(o)) for o in (1, 2, 3))", [(5, "1"), (5, "2"), (5, "3")]),
    "bulk_create that ignores conflicts": ("n = note(); Note.objects.bulk_create([Note(note_id=n.pk, owner_id=1, author_id=9, text='x'), Note(owner_id=1, author_id=3, text='new')], ignore_conflicts=True)", [(2, "text"), (3, "new")]),
    "bulk_update": ("a, b = note(), note(author=3)\na.text = b.text = 'b'; b.author_id = 7\nNote.objects.bulk_update([a, b], ['text', 'author_id'])", [(2, "b"), (7, "b")]),
    "get_or_create": ("Note.objects.get_or_create(owner_id=1, text='g', defaults={'author_id': 3})", [(3, "g")]),
    "update_or_create": ("note(); Note.objects.update_or_create(owner_id=1, text='text', defaults={'author_id': 3})", [(3, "text")]),
    "a related manager": ("n = note(); n.replies.create(owner_id=1, author_id=4, text='r')", [(2, "text"), (4, "r")]),
    "a block": ("with sharded_orm.atomic(Note, owner_id=1):\n    note(); note(author=3); Note.objects.filter(owner_id=1, author_id=3).delete()", [(2, "text")]),
    "a change in memory": ("with sharded_orm.atomic(Note, owner_id=1):\n    n = note()\n    n.text = 'not saved'", [(2, "text")]),
    "a value in another form": ("note(author='2', price='1.50', is_public=1)", [(2, "text")]),
    "an id in another form": ("note(owner='1', note_id='77')", [(2, "text")]),
    "the same id in another form": ("note(note_id=77); Note.objects.filter(owner_id='1').update(note_id='77', text='b')", [(2, "b")]),
    "a rollback": ("""
try:
    with sharded_orm.atomic(Note, owner_id=1):
        note()
        1 / 0
except ZeroDivisionError:
    pass""", []),
    "a rollback to a savepoint": ("""
with sharded_orm.atomic(Note, owner_id=1):
    note(text='kept')
    try:
        with sharded_orm.atomic(Note, owner_id=1):
            Note.objects.filter(owner_id=1).update(text='lost')
            note()
            1 / 0
    except ZeroDivisionError:
        pass
note(text='later')""", [(2, "kept"), (2, "later")]),
    "a block of the group": ("with transaction.atomic(using='books'):\n    note(); note(4, 5)", [(2, "text"), (5, "text")]),
    "a block of the mirror's shard around it": ("with sharded_orm.atomic(WrittenNote, author_id=2):\n    note()\n    assert not WrittenNote.objects.filter(author_id=2).exists()", [(2, "text")]),
}  # fmt: skip


def test_every_write_reaches_the_mirrors(site_everywhere: Site) -> None:
    # One process for all: a start costs more than most writes.
    program = [f"WRITES = {WRITES!r}"]
    program.append("""
for name, (code, expected) in WRITES.items():
    try:
        exec(code, globals())
        there = rows(WrittenNote, "author_id", "text")
        if there != expected or differences():
            print(name, there, differences())
    except Exception as error:
        import traceback; traceback.print_exc()
        print(name, repr(error))
    Note.objects.scatter().delete()
    if rows(WrittenNote, "pk") or rows(PublicNote, "pk"):
        print(name, "left", rows(WrittenNote, "text"))
""")
    assert site_everywhere.run("\n".join(program)) == ""


@pytest.mark.parametrize("is_public", [True, False])
def test_a_condition(site: Site, is_public: bool) -> None:
    out = site.run(f"""
n = note(is_public={is_public})
print(rows(PublicNote, "text"))
Note.objects.filter(owner_id=1).update(is_public={not is_public})
print(rows(PublicNote, "text"), rows(WrittenNote, "text"), differences())
n.delete()
print(rows(PublicNote, "text"))
""")
    there, gone = "[('text',)]", "[]"
    first, second = (there, gone) if is_public else (gone, there)
    assert out.splitlines() == [first, f"{second} {there} []", gone]


def test_many_to_many(site: Site) -> None:
    out = site.run("""
n = note()
one, two = (Topic.objects.create(owner_id=1, name=name) for name in ("one", "two"))
n.topics.add(one, two, through_defaults={"owner_id": 1})
n.topics.add(one, through_defaults={"owner_id": 1})
print(len(rows(TopicOfNote, "pk")), differences())
n.topics.remove(one)
print(rows(TopicOfNote, "topic_id") == [(two.pk,)], differences())
n.topics.set([one], through_defaults={"owner_id": 1})
print(rows(TopicOfNote, "topic_id") == [(one.pk,)], differences())
n.delete()
print(rows(TopicOfNote, "pk"), differences())
""")
    assert out.splitlines() == ["2 []", "True []", "True []", "[] []"]


def test_what_cannot_be_followed_is_refused(site: Site) -> None:
    out = site.run("""
n = note()
def refused(write):
    try:
        write()
    except (MirrorReadOnly, WriteNotFollowed) as error:
        print(type(error).__name__, str(error).split(":")[0])
    else:
        print("not refused")
mirrored = WrittenNote.objects.get(author_id=2)
refused(mirrored.save)
refused(mirrored.delete)
refused(lambda: WrittenNote.objects.create(note_id=5, author_id=2, owner_id=1, text="", price=0, changed_at=n.changed_at))
refused(lambda: WrittenNote.objects.filter(author_id=2).update(text="x"))
refused(lambda: WrittenNote.objects.filter(author_id=2).delete())
refused(lambda: Note.objects.bulk_create([n], update_conflicts=True, update_fields=["text"], **({} if connections["books_00001"].vendor == "mysql" else {"unique_fields": ["note_id"]})))
refused(lambda: Note.objects.filter(owner_id=1).update(note_id=9))
print(rows(WrittenNote, "text"), differences())
""")
    read_only = "MirrorReadOnly WrittenNote is a mirror of notes.Note"
    assert out.splitlines() == [
        *[read_only] * 5,
        "WriteNotFollowed bulk_create(update_conflicts=True) of Note was refused",
        "WriteNotFollowed update() of 'note_id' was refused",
        "[('text',)] []",
    ]


def test_fixtures_and_historical_models(site: Site) -> None:
    out = site.run(f"""
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
n = note(1, 2, "fixture")
call_command("dumpdata", "notes.note", output="{site.folder}/notes.json", verbosity=0)
n.delete()
call_command("loaddata", "{site.folder}/notes.json", verbosity=0)
print(rows(WrittenNote, "text"), differences())
Historical = MigrationLoader(connection).project_state().apps.get_model("notes", "Note")
Historical.objects.using("books_00001").update(text="migrated")
print(rows(WrittenNote, "text"), differences())
old = Historical.objects.using("books_00001").get()
old.text = "saved"
old.save(using="books_00001")
print(rows(WrittenNote, "text"), differences())
old.owner_id = 5
try:
    old.save(using="books_00001")
except WriteNotFollowed as error:
    print(str(error).split(":")[0])
before = MigrationLoader(connection).project_state()
before.remove_field("notes", "note", "author_id")
try:
    before.apps.get_model("notes", "Note").objects.using("books_00001").update(text="lost")
except WriteNotFollowed as error:
    print("Write the rows in a later migration" in str(error))
print(rows(WrittenNote, "text"), differences())
""")
    assert out.splitlines() == [
        "[('fixture',)] []",
        "[('migrated',)] []",
        "[('saved',)] []",
        "update() of 'owner_id' was refused",
        "True",
        "[('saved',)] []",
    ]


def test_a_savepoint_of_its_own_takes_its_entries_along(site: Site) -> None:
    out = site.run("""
alias = "books_00001"
with transaction.atomic(using=alias):
    note(text="kept")
    sid = transaction.savepoint(using=alias)
    note(text="lost")
    Note.objects.filter(owner_id=1).update(text="lost")
    transaction.savepoint_rollback(sid, using=alias)
    note(text="later")
print(rows(WrittenNote, "text"), differences())
with transaction.atomic(using=alias):
    sid = transaction.savepoint(using=alias)
    note(text="lost")
    transaction.savepoint_rollback(sid, using=alias)
print(rows(WrittenNote, "text"), differences())
""")
    assert out.splitlines() == ["[('kept',), ('later',)] []"] * 2


def test_rows_that_are_not_in_the_outbox_are_not_committed(site: Site) -> None:
    out = site.run("""
note(text="kept")
alias = "books_00001"
def fail(execute, sql, *rest):
    if sql.startswith("INSERT") and "outboxrow" in sql:
        raise RuntimeError
    return execute(sql, *rest)
try:
    with connections[alias].execute_wrapper(fail), transaction.atomic(using=alias):
        try:
            Note.objects.filter(owner_id=1).update(text="lost")
        except RuntimeError:
            transaction.set_rollback(False, using=alias)
        else:  # The row of the outbox is sent with the COMMIT.
            assert connections[alias].sends_with_commit
except WriteNotFollowed as error:
    assert f"The transaction on {alias!r} was rolled back" in str(error)
    print("refused")
except RuntimeError:
    print("refused")
print(list(Note.objects.filter(owner_id=1).values_list("text", flat=True)), differences())
""")
    assert out.splitlines() == ["refused", "['kept'] []"]


def test_a_branch_that_is_committed_later_is_delivered_later(site_everywhere: Site) -> None:
    site = site_everywhere
    if site.backend == "sqlite3":
        pytest.skip("SQLite does not prepare transactions")
    out = site.run("""
from django.db import OperationalError
from sharded_orm.backends.two_phase.branch import BranchName, new_transaction
n = note(text="old")
shard = connections["books_00001"]
branch = BranchName(new_transaction("books_00000"), shard.shard.schema)
def lose_session(commit):
    raise OperationalError("before the COMMIT of the branch")
with transaction.atomic(using=shard.alias):
    shard.begin_branch(branch)
    n.text = "new"
    n.save()
    note(text="second")
    shard.prepare_branch()
    shard.is_bound = True
    shard._commit_writes = lose_session
print(rows(WrittenNote, "text"), outbox())
del shard._commit_writes
shard.end_branch(branch, commit=True)
""")
    assert out == "[('old',)] 1"
    site.manage("mirrors", "relay", "--once")
    out = site.run('print(rows(WrittenNote, "text"), differences(), outbox())')
    assert out == "[('new',), ('second',)] [] 0"


def test_rows_that_an_insert_has_left_out_are_locked_or_not_recorded(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
import threading
from sharded_orm.contrib.mirrors import capture
with connections["books_00001"].cursor() as cursor:
    cursor.execute("CREATE UNIQUE INDEX one_text ON notes_note (text)")
n = note(text="same")
QuerySet(OutboxRow, using="books_00001")._raw_delete("books_00001")
def insert(*notes):
    Note.objects.bulk_create([Note(owner_id=1, author_id=3, **values) for values in notes], ignore_conflicts=True)
insert({"note_id": 70, "text": "same"}, {"note_id": 71, "text": "new"})
print(sorted(QuerySet(OutboxRow, using="books_00001").values_list("row", flat=True)), differences())
locked, order = threading.Event(), []
def write_first():
    with transaction.atomic(using="books_00001"):
        Note.objects.filter(owner_id=1, pk=n.pk).update(text="first")
        locked.set()
        later.join(0.5)
        order.append("update")
    connections.close_all()
def write_later():
    locked.wait()
    insert({"note_id": n.pk, "text": "other"})
    order.append("insert")
    connections.close_all()
first, later = threading.Thread(target=write_first), threading.Thread(target=write_later)
later.start(), first.start()
first.join(), later.join()
print(order, differences())
""")
    assert out.splitlines() == ["['71'] []", "['update', 'insert'] []"]


def test_delivered_rows_are_removed_in_batches(site: Site) -> None:
    out = site.run("""
from sharded_orm.contrib.mirrors import removal
removal.REMOVED_AT_ONCE = 3
for _ in range(5):
    note()
    print(outbox())
""")
    assert out.split() == ["1", "2", "0", "1", "2"]


def test_forms(site: Site) -> None:
    out = site.run("""
from django import forms
def form_of(model, row):
    return forms.modelform_factory(model, fields=["text"])({"text": "by a form"}, instance=row)
n = note()
form_of(Note, n).save()
copy = WrittenNote.objects.get(author_id=2)
print(copy.text, differences())
try:
    form_of(WrittenNote, copy).save()
except MirrorReadOnly as error:
    print(error)
""")
    first, second = out.splitlines()
    assert first == "by a form []"
    assert "Write Note instead" in second


@pytest.mark.parametrize("site", ["mariadb"], indirect=True)
def test_the_outbox_is_written_with_the_commit_or_before_an_implicit_one(site: Site) -> None:
    out = site.run("""
alias = "books_00001"
def execute(sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
with transaction.atomic(using=alias):
    n = note(text="kept")
    print(outbox())
    sid = transaction.savepoint(using=alias)
    note(text="lost")
    execute("SET @x = 1")  # It may commit, as far as the backend can tell.
    print(outbox())
    transaction.savepoint_rollback(sid, using=alias)
    print(outbox())
print(rows(WrittenNote, "text"), outbox())
try:
    with transaction.atomic(using=alias):
        n.text = "committed by the next statement"
        n.save()
        execute("CREATE TABLE other (id int)")
        note(text="lost")
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
print(rows(Note, "text"), rows(WrittenNote, "text"))
""")
    assert out.splitlines() == [
        "0",
        "2",
        "0",
        "[('kept',)] 1",
        "[('committed by the next statement',)] [('kept',)]",
    ]
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(differences(), outbox())") == "[] 0"


@pytest.mark.parametrize("site", ["mariadb"], indirect=True)
def test_rows_that_could_not_be_recorded_are_recorded_later(site: Site) -> None:
    """The program goes on after an error of the outbox, which a later statement has raised."""
    out = site.run("""
from django.db import DatabaseError
alias, is_down = "books_00001", True
def fail(execute, sql, *rest):
    if is_down and OutboxRow._meta.db_table in sql:
        raise DatabaseError("the outbox is down")
    return execute(sql, *rest)
with connections[alias].execute_wrapper(fail), transaction.atomic(using=alias):
    note(text="kept")
    with connections[alias].cursor() as cursor:
        try:
            cursor.execute("SET @x = 1")
        except DatabaseError as error:
            print(error)
    is_down = False
print(rows(Note, "text"), rows(WrittenNote, "text"), differences())
""")
    assert out.splitlines() == ["the outbox is down", "[('kept',)] [('kept',)] []"]


@pytest.mark.parametrize("site", ["mariadb"], indirect=True)
def test_an_outbox_that_cannot_be_written_undoes_a_block_of_the_group(site: Site) -> None:
    out = site.run("""
from django.db import ProgrammingError
from sharded_orm.exceptions import PartialCommitError
def execute(sql):
    with connections["books_00002"].cursor() as cursor:
        cursor.execute(sql)
execute("RENAME TABLE sharded_orm_mirrors_outboxrow TO away")
for write in (
    lambda: note(2, text="lost"),
    lambda: (note(1, text="lost"), note(2, text="lost")),
):
    try:
        with transaction.atomic(using="books"):
            write()
    except PartialCommitError as error:
        print(error)
    except ProgrammingError as error:
        print(error.args[0])
execute("RENAME TABLE away TO sharded_orm_mirrors_outboxrow")
print(rows(Note, "text"), outbox())
""")
    assert out.splitlines() == ["1146", "1146", "[] 0"]


#: A statement on another table ends in a deadlock, which undoes the whole transaction on the server.
_DEADLOCK = """
import threading
from django.db import OperationalError
first, second = Topic.objects.create(owner_id=1, name="1"), Topic.objects.create(owner_id=1, name="2")
alias, has_locked = "books_00001", threading.Barrier(2)
def rename(topic):
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE notes_topic SET name = 'x' WHERE topic_id = %s", [topic.pk])
def other():
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:  # The server undoes the transaction with fewer changes.
            cursor.execute("INSERT INTO notes_topic SELECT topic_id + 1000000, owner_id, name FROM notes_topic")
            cursor.execute("INSERT INTO notes_topic SELECT topic_id + 2000000, owner_id, name FROM notes_topic")
        rename(first)
        has_locked.wait()
        rename(second)
    connections.close_all()
"""


@pytest.mark.parametrize("site", ["mariadb"], indirect=True)
def test_what_a_deadlock_has_undone_is_not_delivered(site: Site) -> None:
    """A program that goes on after a deadlock commits the rest. Its mirror has no more than that."""
    out = site.run(
        _DEADLOCK
        + """
thread = threading.Thread(target=other)
with transaction.atomic(using=alias):
    note(text="undone")
    rename(second)
    thread.start()
    has_locked.wait()
    try:
        rename(first)
    except OperationalError as error:
        print(error.args[0])
    note(text="kept")
thread.join()
print(rows(Note, "text"), rows(WrittenNote, "text"), differences())
"""
    )
    assert out.splitlines() == ["1213", "[('kept',)] [('kept',)] []"]
