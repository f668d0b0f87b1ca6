"""``shards import`` copies rows as they are, once, to the shards of their keys."""

from __future__ import annotations

from tests.integration.imports.site import DEFINITIONS, Site

_RELATED = """
insert(Book, [book(0, title="the zeroth"), book(41, sequel_of_id=49), book(49, sequel_of_id=41)])
insert(Topic, [{"id": n, "name": f"topic {n}", "writer_id": n % 8 + 1} for n in range(9)])
insert(Counted, [{"id": n, "name": f"counted {n}", "writer_id": n + 1} for n in range(3)])
insert(Book.topics.through, [{"id": n, "book_id": n, "topic_id": n % 8 or 8} for n in range(1, 40)])
execute("default", "INSERT INTO library_book_topics (id, book_id, topic_id) VALUES (90, 0, 0)")
insert(Review, [{"book_id": n, "number": n, "writer_id": n % 8 + 1} for n in range(1, 40)])
insert(Novel, [{"book_ptr_id": n, "genre": "long"} for n in range(1, 40, 3)])
"""
_VALUES = """
insert(Book, [
    book(50, title="Ünï ☃ 100% 'x' \\\\", price=Decimal("1.10"), weight=0.1, cover=b"\\x00\\xff%s",
         code=uuid.UUID(int=7), published=False, pages=0, length=datetime.timedelta(microseconds=1),
         day=datetime.date(1999, 12, 31), time=datetime.time(1, 2, 3, 4), extra={"b": [1, None], "a": "ä"}),
    book(51, title="", price=Decimal("0.00"), weight=0.0, cover=b"", published=True, pages=-1),
    book(52, title="null", pages=None),
])
execute("default", "UPDATE library_book SET extra = 'null', secret = 'terces' WHERE id = 51")
execute("default", "UPDATE library_book SET extra = '{\\"b\\":1.50,  \\"a\\":2}' WHERE id = 52")
"""
_SAME = """
import json
from sharded_orm import runtime
problems = []
for model in (Book, Topic, Counted, Review, Novel, Book.topics.through):
    before = raw("default", model)
    aliases = [shard.alias for shard in runtime.group("books").shards()]
    after = sorted(row for alias in aliases for row in raw(alias, model))
    if before != after:
        problems.append([model.__name__, sorted(set(before) ^ set(after))])
print(json.dumps(problems))
"""


def test_rows_are_the_same_on_the_shards_of_their_keys(site: Site) -> None:
    site.fill()
    site.run(DEFINITIONS + _RELATED + _VALUES)
    report = site.copy("--json", "--rows", "7").json
    assert report["ok"], report
    assert report["problems"] == []
    assert report["tables"]["library.Book"] == {
        "rows": 46, "copied": 46, "updated": 0, "differing": 0,
    }  # fmt: skip
    # Tables come after those to which they refer.
    assert list(report["tables"]) == [
        "library.Book", "library.Review", "library.Topic", "library.Book_topics",
        "library.Novel", "library.Counted",
    ]  # fmt: skip
    assert site.run(_SAME) == "[]"
    assert site.run("print(Book.objects.get(writer_id=1, pk=0).title)") == "the zeroth"
    assert site.run("print(Novel.objects.get(writer_id=2, pk=1).title)") == "book 1"
    assert site.run("print(Counted.objects.get(writer_id=1, pk=0).name)") == "counted 0"
    titles = "print([t.name for t in Book.objects.get(writer_id=4, pk=3).topics.all()])"
    assert site.run(titles) == "['topic 3']"
    site.manage("shards", "check", "--group", "books")
    compared = site.copy("--verify", "--json").json
    assert compared["ok"], compared
    assert compared["tables"]["library.Book"]["rows"] == 46


def test_a_second_import_finds_the_rows_equal(site: Site) -> None:
    site.fill()
    site.copy()
    report = site.copy("--json", "--workers", "2", "--rows", "5").json
    assert report["ok"]
    assert report["rounds"] == 1
    assert report["tables"]["library.Book"]["copied"] == 0
    assert site.ids() == list(range(1, 41))


def test_ids_of_new_rows_are_above_the_imported_ones(site: Site) -> None:
    site.fill()
    done = site.copy()
    assert "sequence 'library_book'" in done.out
    new = int(site.run("print(Book.objects.create(writer_id=1, title='new').pk)"))
    assert new > 40
    site.manage("tickets", "verify")


def test_what_was_looked_up_before_is_found_after(site: Site) -> None:
    site.fill()
    output = site.run(
        """
from django.core.management import call_command
from io import StringIO
def copy():
    call_command("shards", "import", "library.Topic", "library.Book", source="default",
                 stdout=StringIO(), verbosity=0)
def books():
    return len(Book.objects.filter(writer_id=2))
copy()
Book.objects.filter(writer_id=2).delete()
# The cache remembers that there are none, as soon as the quarantine after the writes is over.
while not Book.cache.statistics()["list_hits"]:
    assert books() == 0
copy()
print(books())
"""
    )
    assert output == "5"


def test_changed_rows_are_named_and_updated_on_demand(site: Site) -> None:
    site.fill()
    site.copy()
    site.run("execute('default', 'UPDATE library_book SET title = %s WHERE id = 7', 'newer')")
    done = site.copy(code=1)
    assert "1 rows have other values on their shard (library.Book(pk=7) differs" in done.err
    assert "in title" in done.err
    assert "--update" in done.err
    report = site.copy("--update", "--json").json
    assert report["tables"]["library.Book"]["updated"] == 1
    assert site.run("print(Book.objects.get(writer_id=8, pk=7).title)") == "newer"
    site.copy("--verify")


def test_json_of_another_type_is_a_change(site: Site) -> None:
    """Python takes True for 1, and 1 for 1.0."""
    site.fill()
    site.run("""execute('default', "UPDATE library_book SET extra = '{\\"a\\": 1}'")""")
    site.copy()
    site.run(
        """execute('default', "UPDATE library_book SET extra = '{\\"a\\": true}' WHERE id = 7")"""
    )
    assert "differs from its row" in site.copy(code=1).err
    assert "library.Book(pk=7) on" in site.copy("--verify", code=1).err
    site.copy("--update")
    site.copy("--verify")
    assert site.run("print(Book.objects.get(writer_id=8, pk=7).extra)") == "{'a': True}"


def test_rows_of_another_owner_are_named_and_kept(site: Site) -> None:
    site.fill()
    site.copy()
    # Two owners on one shard, because the other owner's row must have the same id there.
    output = site.run(
        """
from sharded_orm import runtime
place = {}
for writer in range(1, 9):
    place.setdefault(runtime.locate("books", writer).alias, []).append(writer)
alias, (one, two, *_) = next(item for item in place.items() if len(item[1]) > 1)
pk = source(Book).filter(writer_id=one).first().pk
execute(alias, "UPDATE library_book SET writer_id = %s WHERE id = %s", two, pk)
print(alias, pk, one, two)
"""
    )
    alias, pk, one, two = output.split()
    done = site.copy(code=1)
    assert (
        f"library.Book(pk={pk}) has writer_id={one} on 'default', but '{alias}' has a row"
        in done.err
    )
    assert f"writer_id={two}" in done.err
    assert site.copy("--update", code=1).err.count("Neither was changed") >= 1
    site.run(f"execute('{alias}', 'DELETE FROM library_book WHERE id = {pk}')")
    site.copy()
    site.copy("--verify")


def test_rows_that_belong_to_a_row_of_another_owner_are_kept(site: Site) -> None:
    """Tables without a key of their own: of a child model, and of a many-to-many relation."""
    site.fill()
    site.run(
        DEFINITIONS
        + """
insert(Topic, [{"id": n, "name": f"topic {n}", "writer_id": n} for n in range(1, 9)])
insert(Novel, [{"book_ptr_id": n, "genre": "long"} for n in range(1, 9)])
"""
    )
    site.copy()
    # Another owner on the same shard has a row with the same id.
    alias, one, pk, other = site.run(
        """
from sharded_orm import runtime
place = {}
for writer in range(1, 9):
    place.setdefault(runtime.locate("books", writer).alias, []).append(writer)
alias, (one, two, *_) = next(item for item in place.items() if len(item[1]) > 1)
novel, other = (source(Book).filter(writer_id=one).order_by("pk"))[:2]
for book in (novel, other):
    execute(alias, "UPDATE library_book SET writer_id = %s WHERE id = %s", two, book.pk)
print(alias, one, novel.pk, other.pk)
"""
    ).split()
    before = f"""
print(raw({alias!r}, Novel), raw({alias!r}, Book.topics.through))
"""
    expected = site.run(before)
    site.run(
        DEFINITIONS
        + f"""
execute("default", "UPDATE library_novel SET genre = 'short' WHERE book_ptr_id = {pk}")
insert(Book.topics.through, [{{"id": 1, "book_id": {pk}, "topic_id": {one}}}])
insert(Novel, [{{"book_ptr_id": {other}, "genre": "long"}}])
"""
    )
    error = site.copy("--update", code=1).err
    assert site.run(before) == expected
    for model in ("library.Book", "library.Novel", "library.Book_topics"):
        assert f"ImportConflict: {model}(pk=" in error, error


def test_text_keys_by_modulo(site: Site) -> None:
    site.run(
        DEFINITIONS
        + """
insert(Account, [{"name": name} for name in ("ada", "eve", "ünï", "a b")])
names = enumerate(("ada", "eve", "ünï", "a b", "ada"), 1)
insert(Order, [{"id": n, "account_id": name, "amount": n} for n, name in names])
"""
    )
    site.copy(models=["library.Order", "library.Account"])
    site.copy("--verify", models=["library.Order", "library.Account"])
    assert site.run("print(Order.objects.filter(account='ada').count())") == "2"


def test_a_key_that_the_shard_takes_for_another_is_refused(site: Site) -> None:
    """The shard's column has a collation by which "ADA" and "ada" are the same."""
    site.run(
        DEFINITIONS
        + """
from sharded_orm import runtime
def home(name):
    return runtime.locate("accounts", name).alias
name = next(name for name in map("name{}".format, range(1000)) if home(name) == home(name.upper()))
alias = home(name)
collation = {"mysql": "utf8mb4_general_ci", "sqlite": "NOCASE"}[connections[alias].vendor]
execute(alias, "DROP TABLE library_order")
execute(alias, "DROP TABLE library_account")
execute(alias, f"CREATE TABLE library_account (name varchar(50) COLLATE {collation} PRIMARY KEY)")
execute(alias, "INSERT INTO library_account (name) VALUES (%s)", name.upper())
insert(Account, [{"name": name}])
"""
    )
    error = site.copy(models=["library.Account"], code=1).err
    # MariaDB tells the collation of a key, so the shard is refused before a row is sent.
    expected = "InexactShardKey" if site.backend == "mysql" else "IntegrityError"
    assert expected in error, error


def test_a_dry_run_writes_nothing(site: Site) -> None:
    site.fill()
    plan = site.copy("--dry-run", "--json", models=["library.Topic", "library.Book"]).json
    assert plan["tables"]["library.Book"] == 40
    assert plan["problems"] == []
    assert "library.Review" in plan["left_out"]
    assert site.ids() == []
    rows = "from sharded_orm.models import OperationRun; print(OperationRun.objects.filter(kind__startswith='import').count())"
    assert site.run(rows) == "0"


def test_another_database_with_another_time_zone(site: Site) -> None:
    """The source is not the global database, so rows of global models are looked up elsewhere."""
    default = site.content["databases"]["default"]
    name = default["NAME"].replace("default", "old")
    site.content["databases"]["old"] = {**default, "NAME": name, "TIME_ZONE": "Asia/Tokyo"}
    site.save()
    site.create_databases()
    site.run(
        """
with connections["old"].schema_editor() as editor:
    editor.create_model(Topic)
    editor.create_model(Book)
    # Its writers are in another database.
    editor.deferred_sql[:] = []
execute("old", "INSERT INTO library_book (id, writer_id, title, changed_at)"
        " VALUES (1, 3, 'one', '2020-03-04 14:06:07')")
"""
    )
    models = ["library.Book", "library.Topic"]
    command = ["shards", "import", *models, "--from", "old"]
    site.manage(*command)
    site.manage(*command, "--verify")
    stored = site.run("print(Book.objects.get(writer_id=3, pk=1).changed_at.isoformat())")
    assert stored == "2020-03-04T05:06:07+00:00"
    site.run("models.QuerySet(Writer, using='default').filter(pk=3).delete()")
    error = site.manage(*command, code=1).err
    assert "1 rows of library.Book refer by 'writer' to rows of library.Writer that do not" in error
