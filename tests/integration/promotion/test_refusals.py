"""What forbids a promotion; nothing is touched then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.promotion.scene import GROUPS, Scene
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
def shared(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(pair, tmp_path_factory.mktemp("refusals"))
    scene.begin()
    return scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    """The same site for all; each test mends what it has broken on the servers."""
    setting, databases = copy.deepcopy(shared.setting), copy.deepcopy(shared.databases)
    yield shared
    shared.setting, shared.databases = setting, databases
    shared.save()
    shared.publish(shared.groups)
    assert shared.are_as_before()


@contextmanager
def altered(scene: Scene, which: str, broken: str, mended: str) -> Iterator[None]:
    server = getattr(scene.pair, which)
    for statement in broken.split(";"):
        execute(server, statement)
    try:
        wait_until_equal(scene.pair) if which == "first" else None
        yield
    finally:
        for statement in mended.split(";"):
            execute(server, statement)


def refused(scene: Scene, *arguments: str) -> str:
    """What a promotion is refused for, and its check as well."""
    checked = scene.promote("--check", *arguments, code=1).err
    told = scene.promote(*arguments, code=1).err
    assert told.strip().splitlines()[1:] == checked.strip().splitlines()[1:]
    assert scene.are_as_before()
    return told


@pytest.mark.parametrize(
    ("privilege", "taken_back"),
    [
        ("READ_ONLY ADMIN ON *.*", "READ_ONLY ADMIN ON *.*"),
        ("SUPER ON *.*", "SUPER ON *.*"),
        ("ALL PRIVILEGES ON *.*", "ALL PRIVILEGES ON *.*"),
    ],
)
def test_an_application_that_may_write_through(
    scene: Scene, privilege: str, taken_back: str
) -> None:
    with altered(scene, "first", f"GRANT {privilege} TO {APP}", f"REVOKE {taken_back} FROM {APP}"):
        told = refused(scene)
    assert f"may write through read_only ({privilege.removesuffix(' ON *.*')})" in told
    assert "'application'" in told


def test_an_application_that_may_write_through_by_a_role(scene: Scene) -> None:
    with altered(
        scene,
        "first",
        "CREATE ROLE inner_role; CREATE ROLE outer_role; GRANT READ_ONLY ADMIN ON *.* TO inner_role;"
        f" GRANT inner_role TO outer_role; GRANT outer_role TO {APP}",
        "DROP ROLE inner_role; DROP ROLE outer_role",
    ):
        assert "may write through read_only (READ_ONLY ADMIN)" in refused(scene)


def test_an_operator_that_lacks_a_privilege(scene: Scene) -> None:
    with altered(
        scene,
        "first",
        f"REVOKE READ_ONLY ADMIN, SLAVE MONITOR ON *.* FROM {OP}",
        f"GRANT READ_ONLY ADMIN, SLAVE MONITOR ON *.* TO {OP}",
    ):
        told = refused(scene)
        assert "GRANT READ_ONLY ADMIN ON *.*" in told
        assert "GRANT READ_ONLY ADMIN, SLAVE MONITOR ON *.*" in told
    wait_until_equal(scene.pair)


@pytest.mark.parametrize("node", ["db1", "db2"])
def test_a_node_without_an_operator(scene: Scene, node: str) -> None:
    del scene.setting["NODES"][node]["OPERATOR"]
    scene.save()
    assert f"node {node!r} has no OPERATOR" in refused(scene)


@pytest.mark.parametrize("node", ["db1", "db2"])
def test_an_operator_that_cannot_log_in(scene: Scene, node: str) -> None:
    scene.setting["NODES"][node]["OPERATOR"]["PASSWORD"] = "wrong-and-secret"
    scene.save()
    told = refused(scene)
    assert f"node {node!r} refuses the OPERATOR account 'operator'" in told
    assert "does not answer" not in told
    assert "wrong-and-secret" not in told


def test_a_server_that_has_refused_an_account_is_not_asked_again(scene: Scene) -> None:
    scene.setting["NODES"]["db1"]["OPERATOR"]["PASSWORD"] = "wrong"
    scene.save()
    before = connections(scene)
    scene.promote("--check", code=1)
    # This look and the check's.
    assert connections(scene) == before + 2


def connections(scene: Scene) -> int:
    """That were made to the first server, with this one."""
    ((_, count),) = execute(scene.pair.first, "SHOW GLOBAL STATUS LIKE 'Connections'")
    return int(count)


@pytest.mark.parametrize("node", ["db1", "db2"])
def test_an_application_that_cannot_log_in(scene: Scene, node: str) -> None:
    scene.setting["NODES"][node]["PASSWORD"] = "wrong-and-secret"
    scene.save()
    told = refused(scene)
    assert f"node {node!r} refuses the application's account 'application'" in told
    assert "wrong-and-secret" not in told


def test_a_replica_that_does_not_answer(scene: Scene) -> None:
    scene.setting["NODES"]["db2"]["PORT"] = 1
    scene.save()
    told = refused(scene)
    assert "node 'db2' does not answer" in told
    assert "account" not in told
    assert "--force" not in told


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
    scene: Scene, broken: str, mended: str, message: str
) -> None:
    with altered(scene, "second", broken, mended):
        assert message in scene.promote("--check", code=1).err
        assert message in scene.promote(code=1).err
        assert not scene.is_read_only("first")
    scene.wait_until_replicating()


def test_a_server_that_is_no_replica(scene: Scene) -> None:
    groups = copy.deepcopy(GROUPS)
    for group in groups.values():
        for each in group["RANGES"]:
            each.update(primary="db2", replica="db1")
    scene.publish(groups)
    done = scene.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "'db1' does not replicate from 'db2', nor from any other server" in done.err
    scene.publish(scene.groups)


def test_a_replica_that_was_written_by_itself(scene: Scene) -> None:
    number = int(scene.logged("first").rpartition("-")[2])
    with altered(
        scene,
        "second",
        f"SET GLOBAL gtid_strict_mode = 0; CREATE TABLE photos_00000.stray_{number} (a INT)",
        "STOP SLAVE",
    ):
        told = scene.promote("--check", code=1).err
    assert "has written by itself" in told
    # Made anew: without what nobody else has.
    execute(scene.pair.second, f"DROP TABLE photos_00000.stray_{number}")
    position = scene.logged("first")
    execute(scene.pair.second, "RESET MASTER")
    execute(scene.pair.second, "SET GLOBAL gtid_slave_pos = %s", (position,))
    execute(scene.pair.second, "START SLAVE")
    scene.wait_until_replicating()


def edited(change: Callable[[list[dict[str, object]]], None]) -> dict[str, object]:
    groups = copy.deepcopy(GROUPS)
    change(groups["photos"]["RANGES"])
    return groups


def test_a_range_without_a_replica(scene: Scene) -> None:
    scene.publish(edited(lambda ranges: ranges[1].pop("replica")))
    assert "range (2, 3) of group 'photos' names no replica" in refused(scene)


def test_ranges_with_different_replicas(scene: Scene) -> None:
    scene.setting["NODES"]["db3"] = scene.pair.node(scene.pair.second, PORT=1)
    scene.save()
    scene.publish(edited(lambda ranges: ranges[1].update(replica="db3")))
    assert "name different replicas" in refused(scene)


def test_the_reasons_as_json(scene: Scene) -> None:
    told = scene.promote("--check", "--json", "--to", "db1", code=1).json
    assert told["outcome"] == "refused"
    assert told["problems"] == ["the ranges on 'db1' name 'db2' as their replica, not 'db1'"]


def test_every_end_is_told_as_json(scene: Scene) -> None:
    told = scene.promote("--abort", "--json", code=1).json
    assert told["problems"] == ["No promotion that replaces 'db1' was broken off."]
    scene.trouble("down")
    try:
        for arguments in ((), ("--check",)):
            told = scene.promote("--json", *arguments, code=1).json
            assert told == {"outcome": "refused", "problems": ["the file does not answer"]}
    finally:
        scene.trouble("")


def test_names_that_are_wrong(scene: Scene) -> None:
    assert "there is no node 'db9'" in refused(scene, "--to", "db9")
    assert "name 'db2' as their replica, not 'db1'" in refused(scene, "--to", "db1")
    done = scene.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "'db2' is the primary of no range" in done.err
    assert "['db1']" in done.err


def test_a_global_database_that_would_be_fenced(scene: Scene) -> None:
    node = scene.pair.node(scene.pair.first)
    scene.databases["other"] = {
        **{key: node[key] for key in ("HOST", "PORT", "USER", "PASSWORD")},
        "ENGINE": "django.db.backends.mysql",
        "NAME": "photos_visits_0",
    }
    scene.save()
    assert "'other' of DATABASES is on the same server" in refused(scene)
    # Where its account is refused, nobody can tell.
    scene.databases["other"]["PASSWORD"] = "wrong"
    scene.save()
    told = refused(scene)
    assert "Whether 'other' of DATABASES is on the same server is not known" in told
    # What does not answer is elsewhere: this server does.
    scene.databases["other"]["PORT"] = 1
    scene.save()
    scene.promote("--check")


def test_another_address_of_the_same_server(scene: Scene) -> None:
    scene.setting["NODES"]["db3"] = scene.pair.node(scene.pair.first, HOST="127.0.0.1")
    scene.setting["NODES"]["db3"]["OPTIONS"] = {
        "charset": "utf8mb4",
        "unix_socket": str(scene.pair.first.folder / "socket"),
    }
    scene.save()
    scene.publish(edited(lambda ranges: ranges[1].update(primary="db3")))
    told = refused(scene)
    assert "nodes 'db3' and 'db1' are the same server by different addresses" in told


def test_shards_that_the_application_does_not_see(scene: Scene) -> None:
    # Not by replication: on the new primary alone, and in no log.
    with scene.unlogged_on_second() as run:
        run(f"REVOKE ALL PRIVILEGES ON `%`.* FROM {APP}")
    told = refused(scene)
    with scene.unlogged_on_second() as run:
        run(f"GRANT {APPLICATION_PRIVILEGES} ON `%`.* TO {APP}")
    assert "on 'db2' the application's account does not see photos_00000" in told


def test_a_source_that_commands_do_not_write(scene: Scene) -> None:
    scene.setting["GROUPS"] = copy.deepcopy(GROUPS)
    del scene.setting["TOPOLOGY"]
    scene.save()
    told = scene.promote(code=1).err
    assert "range [0, 1]: primary 'db1' becomes 'db2'" in told
    assert "SET GLOBAL read_only = ON" in told
    assert not scene.is_read_only("first")


def test_a_dead_primary_needs_force(scene: Scene) -> None:
    told = scene.promote("--force", "--no-input", code=1).err
    assert "'db1' answers" in told
    assert scene.is_as_before()


def test_nodes_that_have_no_replication(scene: Scene, tmp_path: Path) -> None:
    for node in scene.setting["NODES"]:
        scene.setting["NODES"][node] = {
            "ENGINE": "sharded_orm.backends.sqlite3",
            "NAME": str(tmp_path / node),
        }
    scene.save()
    assert "only MariaDB has the replication" in refused(scene)
