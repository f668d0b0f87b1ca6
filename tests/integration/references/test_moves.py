"""Keys move whose rows refer to reference tables."""

from __future__ import annotations

import pytest

from tests.integration.references.site import PREAMBLE, Site
from tests.integration.stopped_process import go_on, wait_until_stopped

#: Owner 3 is on the last shard of the group.
_PHOTO = """
france = Country.objects.create(name="France", code="FR")
Photo.objects.create(owner_id=3, title="a", country=france)
"""
_JOINED = "print(Photo.objects.filter(owner_id=3, country__code='FR').count(), differences())"


@pytest.fixture
def site(site: Site) -> Site:
    site.content["sharded_orm"]["PLACEMENT_LEASE"] = 0.4
    site.save()
    return site


def _move(site: Site, code: int = 0) -> str:
    """Move owner 3 to the first shard of the group."""
    done = site.manage("keys", "move", "books", "3", "--to", "0", "--keep", "0", code=code)
    return done.out + done.err


def test_a_key_does_not_move_where_copies_are_late(site: Site) -> None:
    site.run(
        _PHOTO
        + """
with connections["books_00000"].cursor() as cursor:  # As on a new shard, before any relay has run.
    cursor.execute("DELETE FROM geo_country")
    cursor.execute("DELETE FROM sharded_orm_references_tableversion")
"""
    )
    said = _move(site, code=1)
    assert "geo_photo" in said
    assert "geo_country" in said
    assert "manage.py mirrors relay --once" in said
    assert site.run(_JOINED) == "1 [('Country', 'books_00000')]"
    site.manage("mirrors", "relay", "--once", "--verbosity", "0")
    _move(site)
    assert site.run(_JOINED) == "1 []"


#: Stops between the deletion of the copy on the first shard and that on the last one.
_DELETES = """
import os, signal
from sharded_orm.contrib.references.removal import _Removal
run = _Removal.run
def stopping(self, pks):
    result = run(self, pks)
    if self._alias == "books_00000":
        os.kill(os.getpid(), signal.SIGSTOP)
    return result
_Removal.run = stopping
print(refused((ProtectedError, ReferenceRowKept), lambda: Country.objects.all()._raw_delete("default"))[0])
"""


# On SQLite, the writer locks the global database, so no move goes on beside it.
@pytest.mark.parametrize(
    "site", ["mariadb", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)
def test_a_key_does_not_move_behind_a_deletion(site: Site) -> None:
    """The deletion has passed the new shard of the key, where its rows are not yet."""
    site.run(_PHOTO)
    process = site.start("run", PREAMBLE + _DELETES)
    wait_until_stopped(process)
    try:
        said = _move(site, code=1)
    finally:
        out, err = go_on(process)
    assert "geo_country" in said
    assert out.strip() == "ReferenceRowKept", err
    assert site.run(_JOINED) == "1 []"
