from __future__ import annotations

from tests.integration.references.site import Site


def test_every_write_reaches_the_copies(site_everywhere: Site) -> None:
    site_everywhere.run(
        """
def equal(step):
    assert not differences(), (step, differences())

europe = Continent.objects.create(name="Europe")
france = Country.objects.create(name="France", code="FR", continent=europe, facts={"a": [1, None]})
equal("create")
Country.objects.bulk_create([Country(pk=10 + n, name=f"c{n}", code=f"{n:02}", area="1.50") for n in range(4)])
equal("bulk_create")
Country.objects.filter(area__gt=1).update(area=F("area") * 2, neighbour=france)
equal("update")
france.name = "La France"
france.save()
equal("save")
Country.objects.bulk_update([Country(pk=10, name="x"), Country(pk=11, name="y")], ["name"])
equal("bulk_update")
Country.objects.update_or_create(code="00", defaults={"name": "z"})
Country.objects.get_or_create(code="GR", defaults={"name": "Greece"})
equal("or_create")
photo = Photo.objects.create(owner_id=1, title="a", country=france)
with transaction.atomic():
    # Two rows swap a unique value, and a shard has rows that refer to one of them.
    Country.objects.filter(code="FR").update(code="--")
    Country.objects.filter(code="00").update(code="FR")
    Country.objects.filter(code="--").update(code="00")
equal("swap")
assert Photo.objects.get(owner_id=1, country__code="00").title == "a"
for there in (Photo.objects.select_related("country").get(owner_id=1).country,):
    assert there._state.db.startswith("books_")
    there.name = "France"
    there.save()
    there.refresh_from_db()
    assert (there.name, there._state.db) == ("France", "default")
equal("an instance that was read from a copy")
with transaction.atomic():
    try:
        with transaction.atomic():
            Country.objects.create(name="No", code="NO")
            raise ValueError
    except ValueError:
        pass
    Country.objects.create(name="Yes", code="YE")
equal("savepoint")
with transaction.atomic():
    Country.objects.filter(code="YE").update(name="before a savepoint")
    try:
        with transaction.atomic():
            if connections["default"].vendor == "mysql":  # It may commit, as far as the backend can tell.
                with connections["default"].cursor() as cursor:
                    cursor.execute("SET @x = 1")
            raise ValueError
    except ValueError:
        pass
equal("recorded inside of a savepoint that is rolled back")
for facts in (None, Value(None, JSONField()), {"a": None}, Value(None, JSONField())):
    Country.objects.update(notes=facts, facts=facts or {})
    equal(facts)
    assert QuerySet(Country, using=ALIASES[0]).filter(notes=None).exists() is isinstance(facts, Value)
    assert QuerySet(Country, using=ALIASES[0]).filter(notes__isnull=True).exists() is (facts is None)
Country.objects.create(name="Null", code="NU", facts=Value(None, JSONField()))
equal("a new row with the value null of JSON")
with transaction.atomic(using="books"):
    Photo.objects.create(owner_id=2, title="b", country=france)
    Country.objects.filter(code="YE").update(name="Later")
    assert differences(["books_00002"])
equal("a transaction on shards was open")
if connections["default"].vendor == "mysql":
    try:
        with transaction.atomic():
            Country.objects.filter(code="GR").update(name="committed by the next statement")
            with connections["default"].cursor() as cursor:
                cursor.execute("CREATE TABLE geo_other (id int)")
            raise ValueError
    except ValueError:
        pass
    assert Country.objects.get(code="GR").name.startswith("committed")
    Visa.objects.create(name="brings what was left")
    equal("an implicit commit")
"""
    )


def test_rows_are_deleted_as_on_one_database(site_everywhere: Site) -> None:
    site_everywhere.run(
        """
france, greece, spain = (Country.objects.create(name=c, code=c) for c in ("FR", "GR", "ES"))
paris = City.objects.create(name="Paris", country=france, capital_of=None)
City.objects.create(name="Lyon", country=france, capital_of=paris)
visa = Visa.objects.create(name="v")
for owner in (1, 2, 3):
    Photo.objects.create(owner_id=owner, title="a", country=greece, visa=visa)
photo = Photo.objects.get(owner_id=3)
Remark.objects.create(owner_id=3, photo=photo, country=spain, text="x")

for owner in (1, 2):
    photo = Photo.objects.get(owner_id=owner)
    Remark.objects.create(owner_id=owner, photo=photo, city=paris, text="x")
assert france.delete() == (3, {"geo.City": 2, "geo.Country": 1})
assert Remark.objects.scatter().filter(city=None).count() == 3
assert refused(ProtectedError, greece.delete)
assert refused(ReferenceRowKept, spain.delete)  # DO_NOTHING: the database itself refuses.
assert refused(ReferenceRowKept, Country.objects.filter(code="ES").delete)
if connections["default"].vendor == "postgresql":
    # A transaction that stays open on a shard must not hold up the writers of all reference tables.
    import threading
    from sharded_orm.contrib.references import delivery
    delivery._PATIENCE = 0.1
    refers, may_end = threading.Event(), threading.Event()
    def refer():
        with transaction.atomic(using=ALIASES[-1]):
            # As a row does that refers to the country, if its constraint is checked at once.
            with connections[ALIASES[-1]].cursor() as cursor:
                cursor.execute("SELECT 1 FROM geo_country FOR KEY SHARE")
            refers.set()
            may_end.wait()
        connections.close_all()
    free = Country.objects.create(name="Free", code="FF")
    thread = threading.Thread(target=refer)
    thread.start()
    refers.wait()
    try:
        assert "Try again" in refused(ReferenceRowKept, free.delete)[1]
    finally:
        may_end.set()
        thread.join()
    assert not differences(), differences()
    free.delete()
with transaction.atomic(using="books"):
    Photo.objects.filter(owner_id=1).update(views=1)
    assert refused(ReferenceRowKept, City.objects.create(name="x", country=spain).delete)
assert not differences(), differences()
assert Country.objects.count() == 2
City.objects.all().delete()
assert visa.delete()[1] == {"geo.Photo": 3, "geo.Remark": 3, "geo.Visa": 1}
assert greece.delete()[0] == spain.delete()[0] == 1
assert not differences(), differences()
"""
    )


def test_copies_and_missing_rows_are_refused(site: Site) -> None:
    site.run(
        """
from django.core.management import CommandError, call_command
france = Country.objects.create(name="France", code="FR")
there = QuerySet(Country, using="books_00001")
for write in (
    lambda: Country.objects.using("books_00001").create(name="x", code="xx"),
    lambda: there.update(name="x"),
    there.delete,
    lambda: france.save(using="books_00001"),
    lambda: there.bulk_create([Country(name="x", code="xx")]),
):
    _, text = refused(CopyReadOnly, write)
    assert "without using()" in text
assert refused(WriteNotFollowed, lambda: Country.objects.bulk_create(
    [france], update_conflicts=True, update_fields=["name"],
    **({} if connections["default"].vendor == "mysql" else {"unique_fields": ["code"]})))
assert refused(WriteNotFollowed, lambda: Country.objects.update(id=F("id") + 100))
assert refused(IntegrityError, lambda: Photo.objects.create(owner_id=1, title="a", country_id=999))
with transaction.atomic():
    greece = Country.objects.create(name="Greece", code="GR")
    assert refused(IntegrityError, lambda: Photo.objects.create(owner_id=1, title="a", country=greece))
Photo.objects.create(owner_id=1, title="a", country=greece)
assert not differences()
"""
    )


def test_fixtures_have_each_row_once(site: Site) -> None:
    site.run(
        """
import io, json
from pathlib import Path
from tempfile import TemporaryDirectory
from django.core.management import CommandError, call_command
france = Country.objects.create(name="France", code="FR")
Photo.objects.create(owner_id=1, title="a", country=france)
Photo.objects.create(owner_id=2, title="b", country=france)
out = io.StringIO()
call_command("dumpdata", stdout=out)
rows = json.loads(out.getvalue())
assert sorted(r["model"] for r in rows if r["model"].startswith("geo")) == ["geo.country", "geo.photo", "geo.photo"]
assert not [r for r in rows if r["model"].startswith("sharded_orm_references")]
out = io.StringIO()
call_command("dumpdata", "sharded_orm_references", stdout=out)
with TemporaryDirectory() as folder:
    def fixture(name, chosen):
        path = Path(folder, f"{name}.json")
        path.write_text(json.dumps(chosen))
        return str(path)
    versions = fixture("versions", json.loads(out.getvalue()))
    both = fixture("both", [r for r in rows if r["model"].startswith("geo")])
    countries = fixture("countries", [r for r in rows if r["model"] == "geo.country"])
    photos = fixture("photos", [r for r in rows if r["model"] == "geo.photo"])
    Photo.objects.filter(owner_id__in=[1, 2]).delete()
    Country.objects.all().delete()
    assert not differences()
    assert "fixture" in refused(Exception, lambda: call_command("loaddata", versions, verbosity=0))[1]
    assert "in a fixture of their own" in refused(CommandError, lambda: call_command("loaddata", both, verbosity=0))[1]
    assert not Country.objects.exists() and not Photo.objects.scatter().exists()
    call_command("loaddata", countries, verbosity=0)
    call_command("loaddata", photos, verbosity=0)
    assert not differences()
    assert Photo.objects.scatter().filter(country__code="FR").count() == 2
"""
    )
