"""A text key whose collation treats two keys as equal: found, refused, fixed by a migration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.migrate.fleet_project import MODELS, Fleet, fleet_on

CUSTOMERS = """
from sharded_orm import ExactCharField

class Customer(ShardedModel):
    name = {field}

    class ShardMeta:
        group = "shop"
        shard_key = "name"

class Parcel(ShardedModel):
    customer = models.ForeignKey(Customer, models.CASCADE, related_name="parcels")

    class ShardMeta:
        group = "shop"
        shard_key = "customer"
"""
INEXACT = "models.CharField(max_length=30, primary_key=True)"
EXACT = "ExactCharField(max_length=30, primary_key=True)"
USE = """
from shop.models import Customer
names = ["Ada", "ada", "Ada ", "ADA"]
for name in names:
    Customer.objects.create(name=name).parcels.create()
for name in names:
    found = Customer.objects.filter(name=name)
    print([c.name for c in found], Customer.objects.get(pk=name).parcels.count())
    print(found.delete()[0])
print(Customer.objects.scatter().count())
"""
REFUSED = """
from sharded_orm.exceptions import InexactShardKey
from shop.models import Customer
for use in (
    lambda: Customer.objects.filter(name="Ada").count(),
    lambda: Customer.objects.create(name="Ada"),
    lambda: Customer.objects.scatter().count(),
):
    try:
        use()
    except InexactShardKey as exc:
        print(exc)
"""
# A data migration with the models of today, as some are written.
FILL = """migrations.RunPython(fill, migrations.RunPython.noop, hints={"model_name": "customer"})"""


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    with fleet_on("mariadb", request, tmp_path, shop=4) as made:
        yield made


def declare(fleet: Fleet, field: str) -> None:
    fleet.write("shop/models.py", MODELS + CUSTOMERS.format(field=field))


def test_it_is_found_refused_and_mended(fleet: Fleet) -> None:
    declare(fleet, INEXACT)
    fleet.manage("makemigrations", "shop", "-v0", "-n", "customers")
    fleet.manage("migrate_shards", "--create")

    refused = fleet.python(REFUSED)
    assert refused.count("shop.Customer.name tells the shard") == 3
    assert "shop_customer.name has the collation 'utf8mb4_general_ci'" in refused
    assert "db_collation='utf8mb4_nopad_bin', or as an ExactCharField" in refused

    # Nothing is pending, so it is an error.
    for database in ("shop", "shop_00002"):
        checked = fleet.manage("check", "--database", database, status=1)
        assert "sharded_orm.E050" in checked.err
        assert "shop.Customer.name" in checked.err
        assert "shop.Parcel.customer" in checked.err
        assert "HINT: Declare shop.Customer.name" in checked.err
    fleet.manage("check")  # uses no database
    looked = fleet.manage("shards", "check", status=1)
    error = " ".join(looked.err.split())
    assert "shop.Customer.name tells the shard" in error
    assert "on 4 shards, 'shop_00000' for one" in error
    listed = fleet.manage("shards", "check", "--json", status=1).json["inexact_keys"]
    assert {one["model"]: one["field"] for one in listed} == {
        "shop.Customer": "name",
        "shop.Parcel": "customer",
    }

    # The recommended fix: one shard by Django's command and the others by ours.
    declare(fleet, EXACT)
    fleet.manage("makemigrations", "shop", "-v0", "-n", "exact")
    warned = fleet.manage("migrate", "--database", "shop_00002", "-v0")
    assert "sharded_orm.E050" in warned.err
    fleet.manage("migrate_shards")
    for database in ("shop", "shop_00002"):
        fleet.manage("check", "--database", database)
    fleet.manage("shards", "check")
    assert fleet.python(USE).split("\n") == [
        "['Ada'] 1",
        "2",
        "['ada'] 1",
        "2",
        "['Ada '] 1",
        "2",
        "['ADA'] 1",
        "2",
        "0",
        "",
    ]


def test_migrations_before_the_one_that_mends(fleet: Fleet) -> None:
    """A new shard passes the state in which its keys are wrong, and is filled there."""
    declare(fleet, INEXACT)
    fleet.manage("makemigrations", "shop", "-v0", "-n", "customers")
    fleet.migration("0003_fill", FILL)
    path = fleet.folder / "shop/migrations/0003_fill.py"
    fill = (
        "def fill(apps, schema_editor):\n"
        "    from shop.models import Customer\n"
        "    alias = schema_editor.connection.alias\n"
        "    from sharded_orm import runtime\n"
        "    for name in ['Ada', 'Bob', 'Eve', 'Joe', 'Zoe']:\n"
        "        if runtime.locate('shop', name).alias == alias:\n"
        "            Customer.objects.get_or_create(name=name)\n\n"
    )
    path.write_text(path.read_text().replace("class Migration", f"{fill}class Migration"))
    declare(fleet, EXACT)
    fleet.manage("makemigrations", "shop", "-v0", "-n", "exact")
    fleet.manage("migrate_shards", "--create")
    count = "from shop.models import Customer\nprint(Customer.objects.scatter().count())"
    assert fleet.python(count).strip() == "5"


VISITS = """
from sharded_orm import ExactCharField

class Land(models.Model):
    code = {field}

class Visit(ShardedModel):
    land = models.ForeignKey(Land, models.DO_NOTHING, db_constraint=False)

    class ShardMeta:
        group = "shop"
        shard_key = "land"
"""
VISIT = """
from sharded_orm.exceptions import InexactShardKey
from shop.models import Visit
try:
    for code in ("at", "AT", "at "):
        Visit.objects.create(land_id=code)
        print(Visit.objects.filter(land_id=code).count())
except InexactShardKey as exc:
    print(exc)
"""


def test_a_key_that_refers_to_the_global_database(fleet: Fleet) -> None:
    """A migration of the other model does not reach the column; the error names one that does."""
    fleet.write("shop/models.py", MODELS + VISITS.format(field=INEXACT))
    fleet.manage("makemigrations", "shop", "-v0", "-n", "visits")
    fleet.manage("migrate", "-v0")
    fleet.manage("migrate_shards", "--create")
    said = fleet.python(VISIT)
    assert "shop.Visit.land tells the shard" in said
    (sql,) = re.findall(r"RunSQL: (ALTER TABLE .*?)\. Then run migrate_shards", said)

    fleet.migration("0003_column", f"migrations.RunSQL({sql!r}, hints={{'model_name': 'visit'}})")
    fleet.manage("migrate", "-v0")
    fleet.manage("migrate_shards")
    assert fleet.python(VISIT).split() == ["1", "1", "1"]
