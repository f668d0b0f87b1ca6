"""A mirror with ``verify_reads`` never shows what its source does not have."""

from __future__ import annotations

from tests.integration.mirrors.site import Site

_PREPARE = """
def execute(alias, sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
for number in range(8):
    note(number % 3 + 1, 5, f"text {number}", note_id=100 + number)
pks = dict((text, pk) for pk, text in rows(WrittenNote, "pk", "text"))
execute("books_00001", f"UPDATE notes_note SET text = 'newer' WHERE note_id = {pks['text 0']}")
execute("books_00002", f"DELETE FROM notes_note WHERE note_id = {pks['text 1']}")
execute("books_00003", f"UPDATE notes_note SET author_id = 6 WHERE note_id = {pks['text 2']}")
mine = VerifiedNote.objects.filter(author_id=5)
def texts(queryset):
    return [row.text for row in queryset]
def stored():
    return sorted(QuerySet(VerifiedNote, using="books_00001").values_list("text", flat=True))
"""


def test_rows_are_mended_and_pages_are_full(site: Site) -> None:
    out = site.run(
        _PREPARE
        + """
print(texts(mine[:3]))
print(texts(mine.filter(text="text 0")), texts(mine.filter(text="newer")))
print(texts(mine.order_by("-pk")[:2]), mine.first().text)
print([row.text for row in VerifiedNote.objects.filter(author_id=6)], stored()[:2])
try:
    VerifiedNote.objects.get(author_id=5, pk=pks["text 1"])
except VerifiedNote.DoesNotExist:
    print("gone")
"""
    )
    assert out.splitlines() == [
        "['newer', 'text 3', 'text 4']",
        "[] ['newer']",
        "['text 7', 'text 6'] newer",
        "['text 2'] ['newer', 'text 3']",
        "gone",
    ]


def test_in_a_transaction_rows_are_left_out(site: Site) -> None:
    out = site.run(
        _PREPARE
        + """
with sharded_orm.atomic(VerifiedNote, author_id=5):
    print(texts(mine[:3]), texts(mine.only("owner_id", "text")[1:3]))
print("text 1" in stored())
"""
    )
    assert out.splitlines() == ["['newer', 'text 3', 'text 4'] ['text 3', 'text 4']", "True"]


def test_what_was_not_delivered_yet_is_delivered(site: Site) -> None:
    out = site.run("""
from sharded_orm.contrib.mirrors import capture
n, m = note(1, 5), note(2, 5, "other")
mine = VerifiedNote.objects.filter(author_id=5)
list(mine)
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
n.text = "newer"
n.save()
m.delete()
print([row.text for row in mine.all()], differences())
with connections["books"].execute_wrapper(lambda execute, sql, *rest: (print(sql.split()[0]), execute(sql, *rest))[1]):
    list(mine.all().uncached())
""")
    assert out.splitlines() == ["['newer'] []", "SELECT", "SELECT"]


def test_one_query_per_shard_of_the_source_or_per_node(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
for number in range(8):
    note(number % 4 + 1, 5)
page = VerifiedNote.objects.filter(author_id=5)
list(page)
sent = []
def count(execute, sql, *rest):
    sent.append(sql)
    return execute(sql, *rest)
with connections["books"].execute_wrapper(count):
    rows = list(page.all().uncached())
print(len(rows), len(sent))
""")
    # The four shards are on two nodes.
    assert out == ("8 5" if site_everywhere.backend == "sqlite3" else "8 3")


#: Each pair of a value that the source has by raw SQL, and one of the mirror.
_NULLS = """
from itertools import product
def execute(alias, sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
VALUES = ["NULL", "'null'", "'{\\"a\\": null}'", "'1'", "'true'", "'1.0'"]
topic = Topic.objects.create(owner_id=1, name="t")
n = note(1, 4)
for source, copy in product(VALUES, VALUES):
    pk = NoteTopic.objects.create(owner_id=1, note=n, topic=topic).pk
    execute("books_00001", f"UPDATE notes_notetopic SET data = {source} WHERE id = {pk}")
    for alias in aliases("books"):
        execute(alias, f"UPDATE notes_verifiedtopic SET data = {copy} WHERE id = {pk}")
mine = VerifiedTopic.objects.filter(topic_id=topic.pk).order_by("pk")
originals = NoteTopic.objects.uncached().filter(owner_id=1).order_by("pk")
CONDITIONS = [Q(data__isnull=True), Q(data=None), Q(data__isnull=False), Q(data=1), Q(data=True), Q(data__a=None), Q()]
def values(queryset):
    return [(row.pk, repr(row.data)) for row in queryset]
def count_queries(action):
    sent = []
    with connections["books"].execute_wrapper(lambda execute, sql, *rest: (sent.append(sql), execute(sql, *rest))[1]):
        action()
    return len(sent)
"""


def test_nulls_are_those_of_the_source(site_everywhere: Site) -> None:
    """A row that a stale null has brought into a page is no longer there; pages are full."""
    out = site_everywhere.run(
        _NULLS
        + """
for condition in CONDITIONS:
    rows = values(originals.filter(condition))
    assert set(values(mine.filter(condition))) <= set(rows), condition
list(mine)
for condition in CONDITIONS:
    rows = values(originals.filter(condition))
    assert values(mine.filter(condition)) == rows, condition
    assert values(mine.filter(condition).uncached()[1:4]) == rows[1:4], condition
    assert values(mine.only("id", "topic_id").filter(condition)) == rows, condition
    assert values(mine.filter(condition).distinct()) == rows, condition
print(count_queries(lambda: list(mine.filter(data=True).uncached())), count_queries(lambda: list(mine.uncached())))
"""
    )
    assert out == "2 3"


def test_in_a_transaction_nulls_are_those_of_the_source(site_everywhere: Site) -> None:
    site_everywhere.run(
        _NULLS
        + """
expected = values(originals)
with sharded_orm.atomic(VerifiedTopic, topic_id=topic.pk):
    assert values(mine) == expected
NoteTopic.objects.filter(owner_id=1).delete()
assert not values(mine.all())
"""
    )


def test_a_page_that_changes_while_its_nulls_are_read_is_read_again(site: Site) -> None:
    out = site.run(
        _NULLS
        + """
from sharded_orm.contrib.mirrors import querysets
list(mine)
nulls, first = mine.filter(data__isnull=True), mine.filter(data__isnull=True)[0].pk
original = querysets.are_null
def raced(names):
    # Between the two queries of the page, its first row leaves it.
    querysets.are_null = original
    NoteTopic.objects.filter(owner_id=1, pk=first).update(data={})
    return original(names)
querysets.are_null = raced
found = values(nulls.uncached())
print(querysets.are_null is original, found == values(originals.filter(data__isnull=True)), first in dict(found))
"""
    )
    assert out == "True True False"


def test_deferred_fields_and_refreshed_rows_are_verified_by_a_base_manager_that_verifies(
    site: Site,
) -> None:
    out = site.run(
        _PREPARE
        + """
VerifiedNote._meta.base_manager_name = "objects"
VerifiedNote._meta.__dict__.pop("base_manager", None)
row = mine.only("pk").get(pk=pks["text 3"])
late = mine.get(pk=pks["text 4"])
gone = mine.get(pk=pks["text 5"])
for alias in ("books_00000", "books_00001", "books_00002", "books_00003"):
    execute(alias, f"UPDATE notes_note SET text = 'newest' WHERE note_id IN ({row.pk}, {late.pk})")
    execute(alias, f"DELETE FROM notes_note WHERE note_id = {gone.pk}")
late.refresh_from_db()
print(row.text, late.text, row.author_id)
try:
    gone.refresh_from_db()
except VerifiedNote.DoesNotExist:
    print("gone")
"""
    )
    assert out.splitlines() == ["newest newest 5", "gone"]
