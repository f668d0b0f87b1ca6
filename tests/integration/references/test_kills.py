"""Writers and relays die at each of their statements, and at any time. Then a relay makes all copies equal."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.integration.imports.kill_points import die_at_each_point
from tests.integration.imports.random_kills import die_at_any_time
from tests.integration.references.site import PREAMBLE, Site

#: There are eight shards, and the points of all are more than 1,400.
STRIDE = 7
#: Rows of shards refer to two of the countries. The third one comes and goes.
_ROWS = """
for code in ("AA", "BB"):
    country, _ = Country.objects.get_or_create(code=code, defaults={"name": code})
    if not Photo.objects.filter(owner_id=3, country=country).exists():
        Photo.objects.create(owner_id=3, title="x", country=country)
"""
_WRITER = """
Country.objects.update_or_create(code="CC", defaults={"name": "new"})
with transaction.atomic():
    Country.objects.filter(code="AA").update(area=F("area") + 1)
    City.objects.create(name="Paris", country=Country.objects.get(code="CC"))
try:
    Country.objects.filter(code="BB").delete()
except ProtectedError:
    pass
Country.objects.get(code="CC").delete()
"""
_CHANGE = """
Country.objects.filter(code="AA").update(area=F("area") + 1)
Country.objects.update_or_create(code="CC", defaults={"name": "new"})
"""
#: As if the writer had died after its commit.
_LEFT_TO_RELAYS = (
    "from sharded_orm.contrib.references import writes\n"
    "writes.bring_all = lambda: type('Nothing', (), {'problems': ()})\n"
)
_RELAY = """
from sharded_orm.contrib.references.delivery import bring_all
bring_all()
"""
_STATE = """
from sharded_orm.contrib.references.delivery import bring_all
for _ in range(100):
    # The server may not have noticed yet that the dead process is gone, which holds locks.
    if not bring_all().problems:
        break
countries = set(Country.objects.values_list("pk", flat=True))
lost = Photo.objects.scatter().filter(country__isnull=False).exclude(country_id__in=countries)
print(differences(), lost.count())
"""


def _copies_are_equal(site: Site, where: int) -> None:
    assert site.run(_STATE) == "[] 0", where


@pytest.mark.long
def test_a_writer_dies_around_each_statement_and_commit(site: Site) -> None:
    site.run(_ROWS)
    die_at_each_point(site, _WRITER, partial(_copies_are_equal, site), stride=STRIDE)
    assert site.run("print(Photo.objects.filter(owner_id=3, country__code='BB').count())") == "1"


@pytest.mark.long
def test_a_relay_dies_around_each_statement_and_commit(site: Site) -> None:
    site.run(_ROWS)
    die_at_each_point(
        site,
        _RELAY,
        partial(_copies_are_equal, site),
        before=lambda: site.run(_LEFT_TO_RELAYS + _CHANGE),
        stride=STRIDE,
    )


#: Works until the alarm ends the process, without a chance to clean up.
_ANY_WRITES = """
def refer():
    country = chance.choice(Country.objects.all())
    Photo.objects.create(owner_id=chance.randint(1, 8), title="x", country=country)

def change_two():
    with transaction.atomic():
        for code in chance.sample("ABCDEF", 2):
            Country.objects.filter(code=code).update(name=str(chance.random()), area=F("area") + 1)

def create_or_update():
    Country.objects.update_or_create(code=chance.choice("ABCDEF"), defaults={"name": str(chance.random())})

def delete():
    owner = chance.randint(1, 8)
    Photo.objects.filter(owner_id=owner).delete()
    Country.objects.filter(code=chance.choice("ABCDEF")).delete()

while True:
    try:
        chance.choice([refer, change_two, create_or_update, create_or_update, delete])()
    except (IndexError, IntegrityError, OperationalError, ProtectedError, ReferenceRowKept):
        pass  # There is no country, rows refer to it, or others hold locks.
"""
_RELAYS = """
from sharded_orm.contrib.references.delivery import bring_all
while True:
    bring_all()
"""


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, id="some"),
        pytest.param(500, id="many", marks=pytest.mark.long),
    ],
)
def test_writers_and_relays_die_at_any_time(site: Site, kills: int) -> None:
    preamble = PREAMBLE + "from django.db import InterfaceError, OperationalError\n"
    programs = [_ANY_WRITES, _ANY_WRITES, _RELAYS] * 2
    for killed in die_at_any_time(site, preamble, programs, kills, random.Random(kills), 0.7):
        _copies_are_equal(site, killed)
    site.manage("mirrors", "check", "--verbosity", "0")
