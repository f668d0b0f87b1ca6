"""A mover of shards that is stopped while it holds locks of the database: its sessions can be ended."""

from __future__ import annotations

import pytest

from tests.integration.imports.site import PREAMBLE
from tests.integration.shard_moves.site import Site
from tests.integration.stopped_process import go_on, wait_until_stopped

_STOP = """
import signal, threading
def stop_before(owner, name):
    method, left = getattr(owner, name), [1]
    def stopping(*args, **kwargs):
        if left:
            left.pop()
            # One that is sent to the process may let this thread go on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return method(*args, **kwargs)
    setattr(owner, name, stopping)
"""
_STOPPED = (
    _STOP
    + """
from sharded_orm.backends.change_capture import ChangeCapture
from sharded_orm.backends.row_access import RowAccess
from sharded_orm.backends.schema_move import SchemaMove
from sharded_orm.operations import shard_moves
stop_before({owner}, "{method}")
print(shard_moves.move_shards("accounts", [0], "db2").moved)
"""
)
_STOPPED_BEFORE_ITS_SCHEMA = (
    _STOP
    + """
from sharded_orm.operations import shard_moves
stop_before(type(connections["accounts_00000"]), "create_shard_database")
print(shard_moves.move_shards("accounts", [0], "db2").moved)
"""
)
_TAKE_OVER = """
from sharded_orm.models import OperationRun
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves import shard_mover
OperationRun.objects.filter(kind="move shards", unfinished=True).update(token="", alive_at=None)
report = shard_moves.repair("accounts", kill=True, tell=print)
print(report.failures, report.notes)
"""
#: Where the mover holds a lock: while it makes its fences, and in a transaction on the target.
MOMENTS = [("ChangeCapture", "watch"), ("RowAccess", "_insert")]


@pytest.mark.parametrize("site", ["mariadb", "postgresql"], indirect=True)
@pytest.mark.parametrize(("owner", "method"), MOMENTS)
def test_sessions_of_a_stopped_mover_are_ended(site: Site, owner: str, method: str) -> None:
    before = site.rows("Account", "Order")
    mover = site.start("run", PREAMBLE + _STOPPED.format(owner=owner, method=method))
    wait_until_stopped(mover)
    said = site.run(_TAKE_OVER)
    assert f"1 sessions on {'db1' if method == 'watch' else 'db2'} were ended" in said
    assert said.endswith("{} []")
    assert site.place(0) == "db1"
    assert site.rows("Account", "Order") == before
    out, err = go_on(mover)
    assert "{0: 'db2'}" not in out, err
    assert site.rows("Account", "Order") == before
    assert site.left() == ""
    site.move("accounts", "0", "--to", "db2", "--keep", "0")
    assert site.rows("Account", "Order") == before


@pytest.mark.parametrize("site", ["mariadb", "postgresql"], indirect=True)
def test_the_schema_that_a_stopped_mover_creates_late_is_dropped(site: Site) -> None:
    mover = site.start("run", PREAMBLE + _STOPPED_BEFORE_ITS_SCHEMA)
    wait_until_stopped(mover)
    site.run(_TAKE_OVER)
    out, err = go_on(mover)
    assert "{0: 'db2'}" not in out, err
    site.manage("shards", "check", code=1)
    site.move("accounts", "--cleanup")
    site.manage("shards", "check")


def test_the_option_goes_with_a_repair(site: Site) -> None:
    done = site.move("accounts", "0", "--to", "db2", "--kill", code=1)
    assert "--kill goes with --repair" in done.err
    site.move("accounts", "--repair", "--kill")
