"""Commands of operators beside prepared branches, on a site with the app."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_orm.two_phase.app import APP
from tests.integration.imports.site import site_on
from tests.integration.shard_moves.site import Site

pytestmark = pytest.mark.long

#: Leaves a branch on shard 2 of each group, as a process does that dies before the decision.
_ORPHANS = """
from sharded_orm.backends.two_phase.branch import BranchName, new_transaction
from sharded_orm import runtime
for group, decider in (("accounts", "accounts_00000"), ("books", "books_00000")):
    shard = runtime.shard(group, 2)
    wrapper = connections[shard.alias]
    branch = BranchName(new_transaction(decider if KNOWN else "unknown_00000"), shard.schema)
    wrapper.set_autocommit(False)
    wrapper.begin_branch(branch)
    execute(shard.alias, UPDATES[group])
    wrapper.prepare_branch()
    wrapper.leave_branch()
    wrapper.set_autocommit(True)
"""
_UPDATES = """
UPDATES = {
    "accounts": f"UPDATE {Order._meta.db_table} SET amount = amount + 1",
    "books": f"UPDATE {Topic._meta.db_table} SET name = 'lost'",
}
"""
#: Ends all branches, as an operator does by hand.
_END = """
for alias in ("accounts_00002", "books_00002"):
    for branch in connections[alias].prepared_branches():
        connections[alias].end_branch(branch, commit=False)
"""
_TRANSFER = """
import sharded_orm
one, two = [Account.objects.using(f"accounts_{n:05d}").order_by("name")[0] for n in (0, 2)]
with sharded_orm.atomic(one, two, two_phase=True):
    Order.objects.create(account=one, amount=11)
    Order.objects.create(account=two, amount=-11)
print([execute(f"accounts_{n:05d}", "SELECT COUNT(*) FROM sharded_orm_decision")[0][0] for n in range(4)])
"""
#: A process reads rows into the cache while a decided branch is prepared.
_CACHED = """
from django.core.management import call_command
from sharded_orm.backends.two_phase.branch import BranchName, new_transaction
from sharded_orm import runtime
topic = Topic.objects.using("books_00002").order_by("pk")[0]
key = {"pk": topic.pk, "writer_id": topic.writer_id}
branch = BranchName(new_transaction("books_00000"), runtime.shard("books", 2).schema)
connections["books_00000"].store_decision(branch.transaction)
wrapper = connections["books_00002"]
wrapper.set_autocommit(False)
wrapper.begin_branch(branch)
execute(wrapper.alias, f"UPDATE {Topic._meta.db_table} SET name = 'new' WHERE id = %s", topic.pk)
wrapper.prepare_branch()
wrapper.leave_branch()
wrapper.set_autocommit(True)
before = [Topic.objects.get(**key).name for _ in range(3)]
assert set(before) == {topic.name}, before
call_command("transactions", "recover", grace=0.0)
print(Topic.objects.get(**key).name)
"""


@pytest.fixture(
    params=["mariadb", "postgresql"],
)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_on(request.param, request, tmp_path, Site) as site:
        site.content["apps"] = [APP]
        site.content["sharded_orm"]["PLACEMENT_LEASE"] = 0.4
        site.save()
        yield site


def test_a_site_with_prepared_branches(site: Site) -> None:
    site.manage("migrate_shards")
    site.manage("makemigrations", "sharded_orm_two_phase", "--check", "--dry-run")
    assert site.run(_TRANSFER) == "[1, 0, 0, 0]"

    site.run("KNOWN = False\n" + _UPDATES + _ORPHANS)
    zero = ("migrate_shards", "sharded_orm_two_phase", "zero", "--group", "accounts")
    commands = (
        zero,
        ("shards", "move", "accounts", "2", "--to", "db1"),
        ("keys", "move", "books", "2", "--to", "1"),
    )
    for command in commands:
        error = site.manage(*command, code=1).err
        assert "'manage.py transactions recover' ends them when it can" in error, error
        alias = "books_00002" if command[0] == "keys" else "accounts_00002"
        assert f"on '{alias}' (node 'db2')" in error and "'unknown_00000'" in error
    # Shards without branches are free.
    site.manage("migrate_shards", "sharded_orm_two_phase", "--group", "accounts", "--shards", "1")
    said = site.manage("transactions", "recover", "--grace", "0", code=1)
    assert (said.out + said.err).count("'unknown_00000'") == 2
    site.run(_END)

    # Whoever can be recovered is recovered by the command itself.
    site.run("KNOWN = True\n" + _UPDATES + _ORPHANS)
    site.manage(*commands[1])
    assert site.place(2) == "db1"
    said = site.manage("transactions", "recover")
    assert "'books_00002' (node 'db2'): rolled back" in said.out
    assert (said.out + said.err).count("'books_00002'") == 1
    site.manage(*commands[2])
    site.manage("shards", "check")
    # The decision moves with its shard.
    site.manage("shards", "move", "accounts", "0", "--to", "db2")
    assert site.run(_TRANSFER) == "[2, 0, 0, 0]"


def test_a_recovery_makes_the_cache_void(site: Site) -> None:
    site.manage("migrate_shards")
    assert site.run(_CACHED).splitlines()[-1] == "new"
