"""Commands read two servers one after the other. Both go on meanwhile, and no comparison misleads."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from sharded_orm.backends.mysql.branches import name_of
from tests.integration.side_switches.interleaving import BRANCH
from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_force import GIVE_UP, entry
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.patience import PATIENCE
from tests.services.replication import execute, replication_status

SIDE = "sharded_orm.backends.mysql.pair_side.MySQLPairSide"
INTERLEAVING = "tests.integration.side_switches.interleaving"


@pytest.fixture
def site(durable_site: PairSite) -> PairSite:
    return durable_site


def pairs(site: PairSite, *arguments: str, beside: str) -> Any:
    """Run ``manage.py pairs …`` beside what happens by a function of ``interleaving``."""
    return site.run(f"from {INTERLEAVING} import *; {beside}; answer = call_pairs(*{arguments!r})")


def test_a_side_writes_between_the_reads_of_a_rejoin(site: PairSite) -> None:
    """The other side has received the transaction by the time at which it is read."""
    writes = f"write_before_status('db2', {site.pair.first.address.mysqldb()!r})"
    assert pairs(site, "rejoin", "db1", beside=writes) == ""
    assert site.writable() == ["db1"]
    assert len(site.all_rows()) > 1


def test_a_table_is_changed_between_the_reads_of_its_columns(site: PairSite) -> None:
    """The other side executes the change a moment later."""
    lock = f"lock_until_wait('db2', {site.pair.second.address.mysqldb()!r})"
    alter = f"alter_before_columns('db1', {site.pair.first.address.mysqldb()!r})"
    assert pairs(site, "check", beside=f"{lock}; {alter}") == ""


def test_a_side_is_given_up_between_the_reads_of_topology_and_servers(site: PairSite) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE IO_THREAD")
    process = site.start("pairs", "check", STOP_AT=f"before:{SIDE}.epochs:4")
    wait_until_stopped(process)
    site.switch(*GIVE_UP)
    _, err = go_on(process)
    assert process.returncode == 1
    assert "later epoch" not in err


def test_a_transaction_is_prepared_before_the_side_of_a_rejoin_is_closed(
    site: PairSite, tmp_path: Path
) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE IO_THREAD")
    site.switch(*GIVE_UP)
    prepare = f"prepare_before_fence('db1', {site.pair.first.address.mysqldb()!r})"
    refused = pairs(site, "rejoin", "db1", beside=prepare)
    execute(site.pair.first, f"XA ROLLBACK {name_of(BRANCH).decode()}")
    assert "a transaction in two phases, 'orphan', is prepared in 'photos_00000'" in refused
    assert site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path)).code == 0


def test_a_side_has_lost_what_the_other_side_has_not_executed_yet(site: PairSite) -> None:
    """As if it had not flushed it before its machine lost power. The other side has it in its relay log."""
    first, second = site.pair.first, site.pair.second
    site.write_a_row(1)
    site.wait_until_equal()
    first.kill()
    shutil.copytree(first.folder / "data", first.folder / "older")
    first.start()
    execute(first, "SET GLOBAL read_only = OFF")
    site.wait_until_replicating()
    execute(second, "STOP SLAVE SQL_THREAD")
    execute(first, entry(3, 30))
    ((written,),) = execute(first, "SELECT REGEXP_SUBSTR(@@gtid_binlog_pos, '1-1-[0-9]+')")
    end = time.monotonic() + PATIENCE
    while written not in replication_status(second)["Gtid_IO_Pos"].split(","):
        assert time.monotonic() < end
    first.kill()
    shutil.rmtree(first.folder / "data")
    (first.folder / "older").rename(first.folder / "data")
    first.start()
    refused = site.manage("pairs", "rejoin", "db1")
    assert refused.code == 1
    assert "'db1' has lost transactions of its own" in refused.err
    assert site.writable() == []
