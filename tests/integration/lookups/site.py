"""A site whose guests are found by lookups, and the processes that write them."""

from __future__ import annotations

from typing import Any

from tests.integration.lookups import project
from tests.integration.moves.site import LEASE
from tests.integration.shard_moves import site as shard_moves_site

#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import collections, hashlib, json, logging, os, random, time
logging.getLogger("sharded_orm").addHandler(logging.NullHandler())
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import QuerySet
from sharded_orm import runtime
from sharded_orm.contrib.lookups import maintenance, reservation
from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from sharded_orm.contrib.lookups.models import LookupEntry
from sharded_orm.exceptions import KeyMoved, ShardMoved
from tests.integration.lookups.guests.models import Guest, ValueEntry

NAMES = ("email", "badge", "room", "city")
UNIQUE = NAMES[:2]
VALUES = {
    "email": [f"{n}@x" for n in range(12)],
    "badge": [f"badge {n}" for n in range(12)],
    "room": [1, 2, 3],
    "city": ["Oslo", "Rome"],
}

def any_values(chance):
    return {name: chance.choice([None, *VALUES[name]]) for name in NAMES}

def rows():
    return sorted(Guest.objects.scatter().values_list("pk", "house_id", *NAMES))

def entries():
    # Reads them without the code under test. Fails if one is on another shard than that of its value.
    stored = list(QuerySet(LookupEntry, using="default").values_list("lookup", "value", "key"))
    for shard in runtime.group("accounts").shards():
        for row in QuerySet(ValueEntry, using=shard.alias).values_list("lookup", "value", "key"):
            digest = hashlib.md5(row[1].encode(), usedforsecurity=False).hexdigest()
            assert int(digest, 16) % 4 == shard.number, (row, shard.alias)
            stored.append(row)
    return sorted(stored)

def expected_entries():
    return sorted(
        (f"guests.guest.{name}", str(value), str(house))
        for _, house, *values in rows()
        for name, value in zip(NAMES, values)
        if value is not None
    )

def used(name):
    # The values that rows have; fails if two rows have the same one of a unique lookup.
    values = [value for value in Guest.objects.scatter().values_list(name, flat=True) if value is not None]
    assert len(values) == len(set(values)), (name, sorted(values))
    return set(values)

def is_deadlock(error):
    return "deadlock" in str(error).lower()
"""


class Site(shard_moves_site.Site):
    """Houses ``n`` are on shard ``n % 4`` of ``books``; entries are in ``default`` and in ``accounts``."""

    project = project
    preamble = PREAMBLE
    first_rows = """
runtime.strategy("books").store.place("books", {str(n): n % 4 for n in range(1, 9)})
call_command("lookups", "build", verbosity=0)
"""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.content["sharded_orm"]["GROUPS"]["pins"], self._ranges["pins"]
        self.content["sharded_orm"]["PLACEMENT_LEASE"] = LEASE
        self.lock_early("default", "directory")
        self.save()

    def initialize(self) -> None:
        self.prepare()
