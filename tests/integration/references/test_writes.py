from __future__ import annotations

from tests.integration.references.site import Site


def test_first(site_everywhere: Site) -> None:
    site = site_everywhere
    assert (
        site.run(
            """
europe = Continent.objects.create(name="Europe")
france = Country.objects.create(name="France", code="FR", continent=europe)
Country.objects.bulk_create([Country(name=f"c{n}", code=f"{n:02}") for n in range(5)])
print(differences())
Country.objects.filter(code="FR").update(name="La France")
Country.objects.filter(code="03").delete()
print(differences())
photo = Photo.objects.create(owner_id=1, title="a", country=france)
Photo.objects.create(owner_id=2, title="b", country=Country.objects.get(code="01"))
rows = Photo.objects.scatter().select_related("country__continent").order_by("-country__name")
print([(p.title, p.country.name, p.country.continent and p.country.continent.name, p.country._state.db) for p in rows])
print(list(Photo.objects.filter(owner_id=1, country__continent__name="Europe").values_list("country__name")))
print(refused(ProtectedError, france.delete)[0])
"""
        ).splitlines()
        == []
    )
