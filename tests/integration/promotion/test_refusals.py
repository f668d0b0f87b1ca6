"""Conditions that forbid a promotion, which then changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.promotion.site import GROUPS, Site
from tests.services.replication import (
    APPLICATION,
    APPLICATION_PRIVILEGES,
    OPERATOR,
    Pair,
    execute,
    wait_until_equal,
)

APP, OP = (f"'{account[0]}'@'%'" for account in (APPLICATION, OPERATOR))


@pytest.fixture(scope="module")
def shared(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(pair, tmp_path_factory.mktemp("refusals"))
    site.create_databases()
    return site


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """One site for all tests; each test repairs what it has broken on the servers."""
    setting, databases = copy.deepcopy(shared.setting), copy.deepcopy(shared.databases)
    yield shared
    shared.setting, shared.databases = setting, databases
    shared.save()
    shared.publish(shared.groups)
    assert shared.are_as_before()


@contextmanager
def altered(site: Site, which: str, broken: str, mended: str) -> Iterator[None]:
    server = getattr(site.pair, which)
    for statement in broken.split(";"):
        execute(server, statement)
    try:
        wait_until_equal(site.pair) if which == "first" else None
        yield
    finally:
        for statement in mended.split(";"):
            execute(server, statement)


def refused(site: Site, *arguments: str) -> str:
    """Return the reasons why a promotion, and its check, are refused."""
    checked = site.promote("--check", *arguments, code=1).err
    error = site.promote(*arguments, code=1).err
    assert error.strip().splitlines()[1:] == checked.strip().splitlines()[1:]
    assert site.are_as_before()
    return error


@pytest.mark.parametrize(
    ("privilege", "taken_back"),
    [
        ("READ_ONLY ADMIN ON *.*", "READ_ONLY ADMIN ON *.*"),
        ("SUPER ON *.*", "SUPER ON *.*"),
        ("ALL PRIVILEGES ON *.*", "ALL PRIVILEGES ON *.*"),
    ],
)
def test_an_application_that_may_write_through(site: Site, privilege: str, taken_back: str) -> None:
    with altered(site, "first", f"GRANT {privilege} TO {APP}", f"REVOKE {taken_back} FROM {APP}"):
        reasons = refused(site)
    assert f"may write through read_only ({privilege.removesuffix(' ON *.*')})" in reasons
    assert "'application'" in reasons


def test_an_application_that_may_write_through_by_a_role(site: Site) -> None:
    with altered(
        site,
        "first",
        "CREATE ROLE inner_role; CREATE ROLE outer_role; GRANT READ_ONLY ADMIN ON *.* TO inner_role;"
        f" GRANT inner_role TO outer_role; GRANT outer_role TO {APP}",
        "DROP ROLE inner_role; DROP ROLE outer_role",
    ):
        assert "may write through read_only (READ_ONLY ADMIN)" in refused(site)


def test_an_operator_that_lacks_a_privilege(site: Site) -> None:
    with altered(
        site,
        "first",
        f"REVOKE READ_ONLY ADMIN, SLAVE MONITOR ON *.* FROM {OP}",
        f"GRANT READ_ONLY ADMIN, SLAVE MONITOR ON *.* TO {OP}",
    ):
        reasons = refused(site)
        assert "GRANT READ_ONLY ADMIN ON *.*" in reasons
        assert "GRANT READ_ONLY ADMIN, SLAVE MONITOR ON *.*" in reasons
    wait_until_equal(site.pair)


@pytest.mark.parametrize("node", ["db1", "db2"])
def test_a_node_without_an_operator(site: Site, node: str) -> None:
    del site.setting["NODES"][node]["OPERATOR"]
    site.save()
    assert f"node {node!r} has no OPERATOR" in refused(site)


@pytest.mark.parametrize("node", ["db1", "db2"])
def test_an_operator_that_cannot_log_in(site: Site, node: str) -> None:
    site.setting["NODES"][node]["OPERATOR"]["PASSWORD"] = "wrong-and-secret"
    site.save()
    reasons = refused(site)
    assert f"node {node!r} refuses the OPERATOR account 'operator'" in reasons
    assert "does not answer" not in reasons
    assert "wrong-and-secret" not in reasons


def test_a_server_that_has_refused_an_account_is_not_asked_again(site: Site) -> None:
    site.setting["NODES"]["db1"]["OPERATOR"]["PASSWORD"] = "wrong"
    site.save()
    before = connections(site)
    site.promote("--check", code=1)
    # This query's connection and the check's.
    assert connections(site) == before + 2


def connections(site: Site) -> int:
    """Return the number of connections made to the first server, including this one."""
    ((_, count),) = execute(site.pair.first, "SHOW GLOBAL STATUS LIKE 'Connections'")
    return int(count)


@pytest.mark.parametrize("node", ["db1", "db2"])
def test_an_application_that_cannot_log_in(site: Site, node: str) -> None:
    site.setting["NODES"][node]["PASSWORD"] = "wrong-and-secret"
    site.save()
    reasons = refused(site)
    assert f"node {node!r} refuses the application's account 'application'" in reasons
    assert "wrong-and-secret" not in reasons


def test_a_replica_that_does_not_answer(site: Site) -> None:
    site.setting["NODES"]["db2"]["PORT"] = 1
    site.save()
    reasons = refused(site)
    assert "node 'db2' does not answer" in reasons
    assert "account" not in reasons
    assert "--force" not in reasons


@pytest.mark.parametrize(
    ("broken", "mended", "message"),
    [
        ("STOP SLAVE", "START SLAVE", "does not receive from"),
        ("STOP SLAVE SQL_THREAD", "START SLAVE", "does not execute what it receives"),
        (
            "STOP SLAVE; SET GLOBAL replicate_ignore_db = 'photos_00003'; START SLAVE",
            "STOP SLAVE; SET GLOBAL replicate_ignore_db = ''; START SLAVE",
            "Replicate_Ignore_DB = 'photos_00003'",
        ),
        (
            "STOP SLAVE; CHANGE MASTER TO MASTER_USE_GTID = no; START SLAVE",
            "STOP SLAVE; CHANGE MASTER TO MASTER_USE_GTID = slave_pos; START SLAVE",
            "replicates without GTID",
        ),
        (
            "STOP SLAVE; CHANGE MASTER TO MASTER_DELAY = 60; START SLAVE",
            "STOP SLAVE; CHANGE MASTER TO MASTER_DELAY = 0; START SLAVE",
            "replicates 60 s later on purpose",
        ),
    ],
    ids=lambda value: value if "SLAVE" not in value else "",
)
def test_a_replica_that_does_not_get_everything(
    site: Site, broken: str, mended: str, message: str
) -> None:
    with altered(site, "second", broken, mended):
        assert message in site.promote("--check", code=1).err
        assert message in site.promote(code=1).err
        assert not site.is_read_only("first")
    site.wait_until_replicating()


def test_a_server_that_is_no_replica(site: Site) -> None:
    groups = copy.deepcopy(GROUPS)
    for group in groups.values():
        for each in group["RANGES"]:
            each.update(primary="db2", replica="db1")
    site.publish(groups)
    done = site.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "'db1' does not replicate from 'db2', nor from any other server" in done.err
    site.publish(site.groups)


def test_a_replica_that_was_written_by_itself(site: Site) -> None:
    number = int(site.logged("first").rpartition("-")[2])
    with altered(
        site,
        "second",
        f"SET GLOBAL gtid_strict_mode = 0; CREATE TABLE photos_00000.stray_{number} (a INT)",
        "STOP SLAVE",
    ):
        error = site.promote("--check", code=1).err
    assert "has written by itself" in error
    # Rebuilt, without the rows that only this server had.
    execute(site.pair.second, f"DROP TABLE photos_00000.stray_{number}")
    position = site.logged("first")
    execute(site.pair.second, "RESET MASTER")
    execute(site.pair.second, "SET GLOBAL gtid_slave_pos = %s", (position,))
    execute(site.pair.second, "START SLAVE")
    site.wait_until_replicating()


def edited(change: Callable[[list[dict[str, object]]], None]) -> dict[str, object]:
    groups = copy.deepcopy(GROUPS)
    change(groups["photos"]["RANGES"])
    return groups


def test_a_range_without_a_replica(site: Site) -> None:
    site.publish(edited(lambda ranges: ranges[1].pop("replica")))
    assert "range (2, 3) of group 'photos' names no replica" in refused(site)


def test_ranges_with_different_replicas(site: Site) -> None:
    site.setting["NODES"]["db3"] = site.pair.node(site.pair.second, PORT=1)
    site.save()
    site.publish(edited(lambda ranges: ranges[1].update(replica="db3")))
    assert "name different replicas" in refused(site)


def test_the_reasons_as_json(site: Site) -> None:
    report = site.promote("--check", "--json", "--to", "db1", code=1).json
    assert report["outcome"] == "refused"
    assert report["problems"] == ["the ranges on 'db1' name 'db2' as their replica, not 'db1'"]


def test_every_end_is_told_as_json(site: Site) -> None:
    report = site.promote("--abort", "--json", code=1).json
    assert report["problems"] == ["No promotion that replaces 'db1' was broken off."]
    site.trouble("down")
    try:
        for arguments in ((), ("--check",)):
            report = site.promote("--json", *arguments, code=1).json
            assert report == {"outcome": "refused", "problems": ["the file does not answer"]}
    finally:
        site.trouble("")


def test_names_that_are_wrong(site: Site) -> None:
    assert "there is no node 'db9'" in refused(site, "--to", "db9")
    assert "name 'db2' as their replica, not 'db1'" in refused(site, "--to", "db1")
    done = site.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "'db2' is the primary of no range" in done.err
    assert "['db1']" in done.err


def test_a_global_database_that_would_be_fenced(site: Site) -> None:
    node = site.pair.node(site.pair.first)
    site.databases["other"] = {
        **{key: node[key] for key in ("HOST", "PORT", "USER", "PASSWORD")},
        "ENGINE": "django.db.backends.mysql",
        "NAME": "photos_visits_0",
    }
    site.save()
    assert "'other' of DATABASES is on the same server" in refused(site)
    # If its account is refused, nobody can tell.
    site.databases["other"]["PASSWORD"] = "wrong"
    site.save()
    reasons = refused(site)
    assert "Whether 'other' of DATABASES is on the same server is not known" in reasons
    # A server that does not answer is another one: this server answers.
    site.databases["other"]["PORT"] = 1
    site.save()
    site.promote("--check")


def test_another_address_of_the_same_server(site: Site) -> None:
    site.setting["NODES"]["db3"] = site.pair.node(site.pair.first, HOST="127.0.0.1")
    site.setting["NODES"]["db3"]["OPTIONS"] = {
        "charset": "utf8mb4",
        "unix_socket": str(site.pair.first.folder / "socket"),
    }
    site.save()
    site.publish(edited(lambda ranges: ranges[1].update(primary="db3")))
    reasons = refused(site)
    assert "nodes 'db3' and 'db1' are the same server by different addresses" in reasons


def test_shards_that_the_application_does_not_see(site: Site) -> None:
    # Not by replication: only on the new primary, and in no log.
    with site.unlogged_on_second() as run:
        run(f"REVOKE ALL PRIVILEGES ON `%`.* FROM {APP}")
    reasons = refused(site)
    with site.unlogged_on_second() as run:
        run(f"GRANT {APPLICATION_PRIVILEGES} ON `%`.* TO {APP}")
    assert "on 'db2' the application's account does not see photos_00000" in reasons


def test_a_source_that_commands_do_not_write(site: Site) -> None:
    site.setting["GROUPS"] = copy.deepcopy(GROUPS)
    del site.setting["TOPOLOGY"]
    site.save()
    error = site.promote(code=1).err
    assert "range [0, 1]: primary 'db1' becomes 'db2'" in error
    assert "SET GLOBAL read_only = ON" in error
    assert not site.is_read_only("first")


def test_a_dead_primary_needs_force(site: Site) -> None:
    error = site.promote("--force", "--no-input", code=1).err
    assert "'db1' answers" in error
    assert site.is_as_before()


def test_nodes_that_have_no_replication(site: Site, tmp_path: Path) -> None:
    for node in site.setting["NODES"]:
        site.setting["NODES"][node] = {
            "ENGINE": "sharded_orm.backends.sqlite3",
            "NAME": str(tmp_path / node),
        }
    site.save()
    assert "only MariaDB and PostgreSQL have the replication" in refused(site)
