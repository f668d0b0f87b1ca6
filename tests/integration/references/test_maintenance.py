from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.references.site import Site

FRANCE = 'france = Country.objects.create(name="France", code="FR")\n'
#: Points at which a writer dies that changes a country, and whether the change is committed then.
WRITES = [
    ("delivery.set_version:1", True),
    *(
        pytest.param(where, is_committed, marks=pytest.mark.long)
        for where, is_committed in (
            ("writes.ReferenceChanges.before_commit:1", False),
            ("delivery.global_version:1", True),
            ("delivery.bring:3", True),
        )
    ),
]
#: The same of a writer that deletes one.
DELETIONS = [
    ("removal.delete_copies:2", False),
    ("writes.ReferenceChanges.before_commit:1", False),
    *(
        pytest.param(where, is_committed, marks=pytest.mark.long)
        for where, is_committed in (
            ("removal.note_removed:1", False),
            ("writes.remove_ahead:1", False),
            ("delivery.global_version:1", True),
            ("delivery.bring:2", True),
        )
    ),
]


def _kill(site: Site, code: str, where: str) -> None:
    # The modules are imported before the point is looked up.
    done = site.python(
        "run",
        "from tests.integration.references.site import PREAMBLE\nexec(PREAMBLE)\n" + code,
        KILL_AT=f"sharded_orm.contrib.references.{where}",
    )
    assert done.code == -9, done.err


def _settle(site: Site) -> None:
    site.manage("mirrors", "relay", "--once", "--verbosity", "0")
    site.run("assert not differences(), differences()")
    site.manage("mirrors", "check", "--verbosity", "0")


@pytest.mark.parametrize(("where", "is_committed"), WRITES)
def test_a_writer_dies(site: Site, where: str, is_committed: bool) -> None:
    site.run(FRANCE)
    _kill(site, 'Country.objects.update(name="changed")', where)
    names = "{'France', 'changed'}"
    site.run(
        f"assert {{QuerySet(Country, using=a).get().name for a in ALIASES}} <= {names}\n"
        f"assert (Country.objects.get().name == 'changed') is {is_committed}"
    )
    _settle(site)


@pytest.mark.parametrize(("where", "is_committed"), DELETIONS)
def test_a_writer_dies_that_deletes_a_row(site: Site, where: str, is_committed: bool) -> None:
    site.run(FRANCE)
    _kill(site, "Country.objects.all().delete()", where)
    site.run(
        f"""
assert Country.objects.exists() is not {is_committed}
for owner in range(1, 9):
    # No row refers to a country that is gone or going; where the copy is still there, the country is, too.
    try:
        Photo.objects.create(owner_id=owner, title="a", country_id=1)
    except IntegrityError:
        continue
    assert Country.objects.exists()
"""
    )
    _settle(site)
    assert site.run("print(Photo.objects.scatter().exclude(country__code='FR').count())") == "0"


# The time limit for locks is that of SQLite.
@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_a_copy_is_not_restored_while_its_row_is_being_deleted(site: Site) -> None:
    site.run(FRANCE)
    deleting = """
import threading
from tests.integration.references.site import PREAMBLE
exec(PREAMBLE)
with transaction.atomic():
    Country.objects.all().delete()
    print("removed", flush=True)
    threading.Event().wait()
"""
    writer = site.start("run", deleting)
    assert writer.stdout is not None and writer.stdout.readline() == "removed\n"
    for entry in (*site.nodes.values(), site.content["databases"]["default"]):
        entry["OPTIONS"]["timeout"] = 0.1  # Nobody else waits for the writer's lock.
    site.save()
    refers = (
        "refused(IntegrityError, lambda: Photo.objects.create(owner_id=1, title='a', country_id=1))"
    )
    site.run(refers)
    site.manage("mirrors", "relay", "--once", code=1)
    site.run(refers)
    writer.kill()
    writer.communicate()
    _settle(site)
    site.run("Photo.objects.create(owner_id=1, title='a', country_id=1)")


def test_a_relay_dies(site: Site) -> None:
    site.run(FRANCE)
    _kill(site, 'Country.objects.update(name="changed")', "delivery.global_version:1")
    done = site.python(
        "manage.py",
        "mirrors",
        "relay",
        "--once",
        KILL_AT="sharded_orm.contrib.references.delivery.bring:3",
    )
    assert done.code == -9
    found = json.loads(site.manage("mirrors", "status", "--json").out)
    (country,) = (c for c in found["references"] if c["reference"] == "geo.Country")
    assert country["shards"] == 8
    assert country["behind"] == 5
    assert country["lag"] > 0
    _settle(site)
    found = json.loads(site.manage("mirrors", "status", "--json").out)
    assert {c["behind"] for c in found["references"]} == {0}


def test_new_shards_are_filled(site_everywhere: Site) -> None:
    site = site_everywhere
    site.run(FRANCE)
    ranges = site.content["sharded_orm"]["GROUPS"]["accounts"]["RANGES"]
    ranges.append({"range": [4, 5], "primary": "db2"})
    site.save()
    site.manage("migrate_shards", "--create", "--verbosity", "0")
    site.run(
        "assert ALIASES[5] == 'accounts_00005' and differences() == [('Country', a) for a in ALIASES[4:6]]"
    )
    site.manage("mirrors", "relay", "--once", "--verbosity", "0")
    site.run("assert not differences()")


def test_what_the_orm_does_not_see_is_found_and_mended(site: Site) -> None:
    site.run(
        FRANCE
        + """
Country.objects.bulk_create([Country(pk=10 + n, name=f"c{n}", code=f"{n:02}") for n in range(3)])
with connections["books_00001"].cursor() as cursor:
    cursor.execute("UPDATE geo_country SET name = 'x' WHERE code = '00'")
    cursor.execute("DELETE FROM geo_country WHERE code = '01'")
with connections["default"].cursor() as cursor:
    cursor.execute("DELETE FROM geo_country WHERE code = '02'")
"""
    )
    done = site.manage("mirrors", "check", "geo.Country", code=1)
    assert "geo.Country(pk=10) on books_00001 is stale" in done.out
    assert "geo.Country(pk=11) on books_00001 is missing" in done.out
    assert "geo.Country(pk=12) on accounts_00003 is orphaned" in done.out
    assert "10 rows differ" in done.err
    site.manage("mirrors", "check", "Country", "--repair", "--verbosity", "0")
    _settle(site)
    # The global rows of another history count anew: the copies are compared as a whole.
    site.run(
        'call_command = __import__("django").core.management.call_command\n'
        'call_command("flush", "--no-input", verbosity=0, database="default")\n' + FRANCE
    )
    _settle(site)


def test_a_table_that_gets_copies_later_is_filled(site: Site) -> None:
    site.run(
        FRANCE
        + """
for alias in ALIASES:
    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM geo_country")
        cursor.execute("DELETE FROM sharded_orm_references_tableversion WHERE name = 'geo.Country'")
"""
    )
    out = site.manage("mirrors", "build", "geo.Country").out
    assert "All shards have the rows of geo.Country; 8 were written." in out
    _settle(site)


def test_rows_are_written_before_the_tables_of_versions_are_migrated(site: Site) -> None:
    site.run(FRANCE)
    site.manage("migrate", "sharded_orm_references", "zero", "--verbosity", "0")
    # As the data migration of an app does that is migrated first.
    site.run(
        'Country.objects.create(name="Greece", code="GR")\nCountry.objects.get(code="FR").delete()'
    )
    site.manage("migrate", "--verbosity", "0")
    site.run('assert TableVersion.objects.using("default").count() == 1')
    _settle(site)


def test_old_code_writes_copies_without_a_new_column(site: Site) -> None:
    site.run(
        FRANCE
        + """
# The old code says that the copies are up to date, and does not know the column.
for alias in ALIASES:
    QuerySet(TableVersion, using=alias).update(columns="of other columns")
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE geo_country SET area = 7")
"""
    )
    found = json.loads(site.manage("mirrors", "status", "--json").out)
    assert {c["behind"] for c in found["references"]} == {8}
    _settle(site)


def test_a_share_of_the_copies_is_compared(site: Site) -> None:
    out = site.run(
        FRANCE
        + """
import io, random
from django.core.management import CommandError, call_command
from sharded_orm.contrib.references import differences as compared
compared.BATCH = 2
Country.objects.bulk_create([Country(pk=10 + n, name=f"c{n}", code=f"{n:02}", facts=1) for n in range(6)])
for alias in ALIASES:
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE geo_country SET facts = 'true' WHERE code = '00'")  # Which is not 1.
        cursor.execute("UPDATE geo_country SET name = 'x' WHERE code = '05'")
def lines(*options):
    out = io.StringIO()
    try:
        call_command("mirrors", "check", *options, stdout=out)
    except CommandError:
        pass
    return [line for line in out.getvalue().splitlines() if "geo.Country" in line]
for options in ((), ("--newest-first",), ("--sample", "100"), ("geo.Country", "--sample", "100", "--newest-first")):
    found = lines(*options)
    print(len(found), found[0])
random.random = lambda: 0.6
print(lines("--sample", "50"))
print(lines("--sample", "70", "Country")[-1])
"""
    )
    first, last = (
        "geo.Country(pk=10) on accounts_00000 is stale",
        "geo.Country(pk=15) on accounts_00000 is stale",
    )
    assert out.splitlines() == [
        f"17 {first}",
        f"17 {last}",
        f"17 {first}",
        f"17 {last}",
        "['geo.Country: 0 rows compared, 0 differ.']",
        "geo.Country: 56 rows compared, 16 differ.",
    ]


def test_a_writer_that_has_lost_its_lock_restores_no_old_copies(site: Site) -> None:
    site.run(
        FRANCE
        + """
from sharded_orm.contrib.references.removal import _Removal
removal = _Removal(Country, "books_00001")
removal.run([france.pk])  # The lock of this writer is lost now.
Country.objects.all().delete()
removal.undo()
assert not differences(), differences()
"""
    )


def test_rows_are_imported_that_refer_to_reference_tables(site: Site) -> None:
    site.run(
        FRANCE
        + """
with connections["default"].schema_editor() as editor:
    editor.create_model(Photo)
with connections["default"].cursor() as cursor:
    for pk in range(1, 13):
        cursor.execute(
            "INSERT INTO geo_photo (photo_id, owner_id, title, views, country_id) VALUES (%s, %s, 'a', 0, %s)",
            [pk, pk % 8 + 1, france.pk if pk % 2 else None])
for alias in ALIASES:  # As new shards are, before any relay has run.
    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM geo_country")
        cursor.execute("DELETE FROM sharded_orm_references_tableversion")
"""
    )
    site.manage("shards", "import", "geo.Photo", "--from", "default")
    # An import checks no foreign keys.
    joined = "print(Photo.objects.scatter().filter(country__code='FR').count())"
    assert site.run(joined) == "0"
    site.manage("mirrors", "build", "geo.Country")
    assert site.run(joined) == "6"
    _settle(site)


def test_a_shard_that_is_down(site: Site, tmp_path: Path) -> None:
    """Rows that its rows may refer to stay, and the other shards get what is written."""
    if site.backend != "sqlite3":
        pytest.skip("here the file of a shard is taken away")
    site.run('Country.objects.create(name="France", code="FR")')
    file, away = site.folder / "db2" / "accounts_00003.sqlite3", tmp_path / "away"
    file.rename(away)
    site.run("""
france, others = Country.objects.get(), [a for a in ALIASES if a != "accounts_00003"]
_, text = refused(ReferenceRowKept, france.delete)
assert "'accounts_00003' cannot say" in text and "Try again when it answers" in text
assert not differences(others)
france.name = "changed"
france.save()
assert not differences(others)
""")
    for command in (["relay", "--once"], ["check"], ["status"]):
        assert "accounts_00003" in site.manage("mirrors", *command, code=1).err
    away.rename(file)
    assert site.run("print(differences())") == "[('Country', 'accounts_00003')]"
    site.manage("mirrors", "relay", "--once", "--verbosity", "0")
    site.run("assert not differences()\nCountry.objects.get().delete()\nassert not differences()")
