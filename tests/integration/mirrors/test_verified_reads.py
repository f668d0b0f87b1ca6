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
