"""A promotion beside prepared branches of transactions in two phases, which it would split."""

from __future__ import annotations

from tests.integration.promotion.site import Site

#: Leaves a branch on shard 0, as a process does that dies before the decision.
_ORPHAN = """
from django.db import connections
from sharded_orm.backends.two_phase.branch import BranchName, new_transaction
shard = runtime.shard("photos", 0)
wrapper = connections[shard.alias]
branch = BranchName(new_transaction("unknown_00000"), shard.schema)
wrapper.set_autocommit(False)
wrapper.begin_branch(branch)
with wrapper.cursor() as cursor:
    cursor.execute("INSERT INTO entries_entry VALUES (77, 0)")
wrapper.prepare_branch()
wrapper.leave_branch()
wrapper.set_autocommit(True)
answer = branch.transaction
"""
_END = """
from django.db import connections
wrapper = connections["photos_00000"]
for branch in wrapper.prepared_branches():
    wrapper.end_branch(branch, commit=False)
answer = len(wrapper.prepared_branches())
"""


def test_a_promotion_beside_a_prepared_branch(site: Site) -> None:
    site.apps = ["sharded_orm.contrib.two_phase"]
    site.save()
    name = site.run(_ORPHAN)
    for arguments in (["--check"], []):
        error = site.promote(*arguments, code=1).err
        assert f"{name!r}, is prepared in 'photos_00000'" in error, error
        assert "transactions recover" in error
    assert site.are_as_before()
    assert site.run(_END) == 0

    # A branch that is prepared after the checks is seen behind the fence, which is taken away again.
    site.promote_and_die("begin:fencing")
    name = site.run(_ORPHAN)
    error = site.promote(code=1).err
    assert f"{name!r}, is prepared in 'photos_00000'" in error, error
    assert site.are_as_before() and site.primaries() == {"db1"}
    assert site.run(_END) == 0
    site.promote()
    assert site.primaries() == {"db2"}
