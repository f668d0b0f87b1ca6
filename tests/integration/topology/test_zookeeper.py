"""A topology in ZooKeeper: pushed to every process, and kept when the servers are down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl_credential

from tests.integration.topology.conftest import site_with_zookeeper
from tests.integration.topology.site import (
    Site,
    document,
    wait_for,
)
from tests.patience import PATIENCE
from tests.services.proxy import Proxy
from tests.services.zookeeper import ZooKeeperServer

PROCESSES = 20


@pytest.fixture
def client(zookeeper: ZooKeeperServer) -> Iterator[KazooClient]:
    """Another client of the server."""
    made = KazooClient(zookeeper.hosts)
    made.start()
    yield made
    made.stop()
    made.close()


def path(site: Site, below: str = "current") -> str:
    return f"{site.source['OPTIONS']['PATH']}/{below}"


def test_a_push_reaches_twenty_processes(zk_site: Site) -> None:
    zk_site.push(document(1))
    with zk_site.processes(PROCESSES) as processes:
        assert {process.ask("place()") for process in processes} == {"one"}
        done = zk_site.push(document(1, "two"), "--wait", "60")
        # All of them; the command itself does not count.
        assert f"{PROCESSES} other processes are connected, and use it." in done.out
        assert {process.ask("place()") for process in processes} == {"two"}
        processes_shown = zk_site.topology("show", "--json").json["processes"]
        assert {one["version"] for one in processes_shown} == {2}
        assert {one["pid"] for one in processes_shown} >= {
            process.popen.pid for process in processes
        }


def test_servers_that_come_back_are_found_again(zk_site: Site, zookeeper: ZooKeeperServer) -> None:
    zk_site.push(document(1))
    with zk_site.processes(3) as processes:
        zookeeper.kill()
        try:
            for process in processes:
                process.wait_log("this process goes on with version 1")
                assert process.ask("place()") == "one"
        finally:
            zookeeper.start()
        zk_site.push(document(1, "two"))
        for process in processes:
            process.wait_version(2)
            assert process.ask("place()") == "two"
            assert "answers again" in process.log


def test_a_start_without_servers_uses_the_last_good_copy(
    zk_site: Site, zookeeper: ZooKeeperServer
) -> None:
    zk_site.push(document(1, "two"))
    zk_site.source["OPTIONS"]["WAIT"] = 0.5
    zk_site.save()
    zookeeper.kill()
    try:
        with zk_site.process() as process:
            assert process.ask("place()") == "two"
            assert (
                f"Going on with the last good copy in {zk_site.last_good}: version 1" in process.log
            )
            shown = zk_site.topology("show", "--json", code=1).json
            assert (shown["version"], shown["origin"]) == (1, "last good copy")
            zookeeper.start()
            zk_site.source["OPTIONS"]["WAIT"] = 20
            zk_site.save()
            pid = process.popen.pid
            wait_for(lambda: zk_site.reported_version(pid) == 1, "it tells its version")
            zk_site.push(document(1, "one"))
            process.wait_version(2)
            assert process.ask("place()") == "one"
    finally:
        if zookeeper.pid is None:
            zookeeper.start()


def test_without_a_copy_and_without_servers_nothing_starts(
    zk_site: Site, zookeeper: ZooKeeperServer
) -> None:
    zk_site.source["OPTIONS"].update(HOSTS="127.0.0.1:1", WAIT=0.2)
    zk_site.save()
    process = zk_site.start("check")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "CommandError: ZooKeeper at 127.0.0.1:1" in err  # after warnings of the client
    assert "There is no last good copy" in err
    assert "Traceback" not in err
    assert "does not answer" in zk_site.topology("show", code=1).err


def test_a_session_that_expires_is_made_anew(zk_site: Site, zookeeper: ZooKeeperServer) -> None:
    zk_site.push(document(1))
    with zk_site.process() as process:
        # A client that connects with a session's id and closes it ends the session for all.
        session, password = process.ask("session()")
        thief = KazooClient(zookeeper.hosts, client_id=(session, bytes.fromhex(password)))
        thief.start()
        thief.stop()
        thief.close()
        process.wait_log("this process goes on with version 1")
        zk_site.push(document(1, "two"))
        process.wait_version(2)
        assert process.ask("session()")[0] != session
        # It is registered again.
        wait_for(
            lambda: any(
                one["pid"] == process.popen.pid and one["version"] == 2
                for one in zk_site.topology("show", "--json").json["processes"]
            ),
            "the process among those connected",
        )


def test_a_partition_heals(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> None:
    with Proxy(*zookeeper.hosts.split(":")[:1], zookeeper.port) as proxy:
        direct = site_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts)
        direct.push(document(1))
        behind = site_with_zookeeper(tmp_path, sqlite_nodes, f"{proxy.host}:{proxy.port}")
        with behind.process() as process:
            direct.save()
            proxy.stall()
            direct.push(document(1, "two"), "--wait", "0")
            process.wait_log("this process goes on with version 1")
            assert process.ask("place()") == "one"
            proxy.forward()
            process.wait_version(2)
            assert process.ask("place()") == "two"


def test_a_forked_worker_follows_by_itself(zk_site: Site) -> None:
    """As gunicorn does with preload_app: the parent has loaded everything, and serves too."""
    zk_site.push(document(1))
    with zk_site.process() as process:
        assert process.ask("place()") == "one"
        child = process.ask("fork()")
        assert process.ask("of_child('place()')") == "one"
        wait_for(lambda: zk_site.reported_version(child) == 1, "the child tells its version")
        zk_site.push(document(1, "two"))
        for ask in (process.ask, lambda text: process.ask(f"of_child({text!r})")):
            wait_for(lambda ask=ask: ask("version()") == 2, "version 2 in use")
            assert ask("place()") == "two"
        assert process.ask("of_child('session()')")[0] != process.ask("session()")[0]
        processes_shown = zk_site.topology("show", "--json").json["processes"]
        assert {child, process.popen.pid} <= {one["pid"] for one in processes_shown}
        # The end of the child does not end the parent's session.
        session = process.ask("session()")
        process.run("of_child('end')")
        zk_site.push(document(2, "one"))
        process.wait_version(3)
        assert process.ask("session()") == session


def test_a_worker_that_is_forked_while_servers_are_down_has_what_its_parent_had(
    zk_site: Site, zookeeper: ZooKeeperServer
) -> None:
    zk_site.push(document(1, "two"))
    with zk_site.process() as process:
        zookeeper.kill()
        try:
            process.ask("fork()")
            assert process.ask("of_child('place()')") == "two"
        finally:
            zookeeper.start()
        zk_site.push(document(1, "one"))
        wait_for(lambda: process.ask("of_child('version()')") == 2, "version 2 in use")


def test_acl_and_authentication(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> None:
    digest = make_digest_acl_credential("operator", "s3cret")
    acl = [["digest", digest, "cdrwa"], ["world", "anyone", "r"]]
    owner = site_with_zookeeper(
        tmp_path, sqlite_nodes, zookeeper.hosts, ACL=acl, AUTH=[["digest", "operator:s3cret"]]
    )
    owner.push(document(1))
    reader = site_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts)
    with reader.process() as process:
        assert process.ask("place()") == "one"
        done = reader.push(document(1, "two"), code=1)
        assert "its ACL wants another AUTH" in done.err
        owner.save()
        done = owner.push(document(1, "two"))
        process.wait_version(2)
        for text in (process.log, done.out, done.err, owner.last_good.read_text()):
            assert "s3cret" not in text


def test_credentials_are_published_when_that_is_wanted(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> None:
    site = site_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts, CREDENTIALS=True)
    secret = {**document(1), "nodes": {"two": {"USER": "app", "PASSWORD": "s3cret"}}}
    site.push(secret)
    changed = {**document(1), "nodes": {"two": {"USER": "app", "PASSWORD": "s3cret2"}}}
    shown = site.topology("diff", site.write(changed), code=1).out
    assert "node 'two': PASSWORD changes" in shown
    outputs = [shown, site.topology("show").out, site.topology("show", "--json").out]
    done = site.push(changed)
    assert all("s3cret" not in text for text in [*outputs, done.out, done.err])
    assert site.last_good.stat().st_mode & 0o777 == 0o600
    pulled = tmp_path / "pulled.json"
    pulled.touch(0o644)
    site.topology("pull", str(pulled))
    assert "s3cret2" in pulled.read_text()
    assert pulled.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_not_there_is_not_pushed(zk_site: Site) -> None:
    assert "cannot be read" in zk_site.topology("push", "nonesuch.json", code=1).err
