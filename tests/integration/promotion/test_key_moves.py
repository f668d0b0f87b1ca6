"""A promotion and moves of keys that meet: the second is refused, and done when the first has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.promotion.postgresql_site import PostgreSQLSite
from tests.integration.promotion.site import GROUPS, SHARDS, Done, Site
from tests.services.replication import Pair

_FILL = f"""
runtime.strategy("photos").store.place("photos", {{str(user): user % {SHARDS} for user in range(4)}})
for user in range(4):
    Entry(entry_id=100 + user, user_id=user).save(force_insert=True)
answer = None
"""
#: The entries of user 0, and the shard on which they are.
_ENTRIES = """
entries = Entry.objects.filter(user_id=0)
answer = sorted((entry.pk, entry._state.db) for entry in entries)
"""
#: Kills a mover when the key belongs to its new shard, and its old rows are still there.
_SWITCHED = "before:sharded_orm.operations.moves.key_mover.KeyMover.settle:1"


@pytest.fixture(params=["mariadb", pytest.param("postgresql", marks=pytest.mark.long)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    """A site whose group has a directory."""
    groups = {"photos": {**GROUPS["photos"], "STRATEGY": "directory"}}
    site: Site
    if request.param == "mariadb":
        pair: Pair = request.getfixturevalue("pair")
        site = Site(pair, tmp_path, groups=groups)
        # With a binary log, only such an account may create triggers.
        for name, server in (("db1", pair.first), ("db2", pair.second)):
            address = server.address.django()
            site.setting["NODES"][name]["OPERATOR"] = {k: address[k] for k in ("USER", "PASSWORD")}
    else:
        site = PostgreSQLSite(request.getfixturevalue("streaming"), tmp_path, groups=groups)
    site.setting["PLACEMENT_LEASE"] = 0.4
    site.save()
    site.create_databases()
    site.run(_FILL)
    return site


def move(site: Site, code: int = 0, **environment: str) -> Done:
    done = site.manage("keys", "move", "photos", "0", "--to", "3", **environment)
    assert done.code == code, done.err
    return done


def test_a_promotion_is_refused_while_a_move_of_keys_is_unfinished(site: Site) -> None:
    move(site, code=-9, KILL_AT=_SWITCHED)
    assert "(move keys 'photos')" in site.promote(code=1).err
    site.let_lease_expire()
    assert "End it by 'manage.py keys repair photos' first" in site.promote(code=1).err
    assert site.is_as_before()
    assert site.manage("keys", "repair", "photos").code == 0
    site.promote()
    assert site.is_promoted()
    assert site.run(_ENTRIES) == [[100, "photos_00003"]]


def test_a_move_of_keys_is_refused_while_a_promotion_is_unfinished(site: Site) -> None:
    site.promote_and_die("begin:waiting")
    assert "(promote 'primaries')" in move(site, code=1).err
    site.let_lease_expire()
    assert "End it by 'manage.py shards promote db1' first" in move(site, code=1).err
    site.promote()
    assert site.is_promoted()
    assert site.run(_ENTRIES) == [[100, "photos_00000"]]
    move(site)
    assert site.run(_ENTRIES) == [[100, "photos_00003"]]
