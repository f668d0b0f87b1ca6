"""A topology in ZooKeeper: pushed to every process, and kept when the servers are down."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl_credential

from tests.integration.topology.conftest import site_with_zookeeper
from tests.integration.topology.site import (
    BREAK,
    MEND,
    Site,
    document,
    unusable_documents,
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


def ranges(*spans: tuple[int, int, str]) -> dict[str, Any]:
    entries = [{"range": [first, last], "primary": node} for first, last, node in spans]
    return {"groups": {"photos": {"RANGES": entries}}}


BAD = {
    "gap": ranges((1, 3, "one")),
    "overlap": ranges((0, 2, "one"), (2, 3, "two")),
    "names the unknown primary 'three'": ranges((0, 3, "three")),
    "the number of shards cannot change from 4 to 8": ranges((0, 7, "one")),
    "shards 3 to 3 are gone": ranges((0, 2, "one")),
    "node 'one': PASSWORD does not belong": {"nodes": {"one": {"PASSWORD": "x"}}},
    "node 'one': OPTIONS['passwd'] does not": {"nodes": {"one": {"OPTIONS": {"passwd": "x"}}}},
    "node 'one': OPERATOR does not": {"nodes": {"one": {"OPERATOR": {"USER": "x"}}}},
    "unknown key 'HOSTS'": {"nodes": {"one": {"HOSTS": "x"}}},
    "format must be 1": {"format": 2},
}


def test_a_bad_push_is_refused_by_the_command_and_by_every_process(
    zk_site: Site, client: KazooClient
) -> None:
    zk_site.push(document(1))
    zk_site.push(document(1, "two"))
    with zk_site.process() as process:
        for problem, wrong in BAD.items():
            bad = {**document(2), **wrong}
            before = client.get(path(zk_site))[1].version
            # The operation as the command calls it, and its error.
            assert problem in process.ask(f"push({bad!r})"), problem
            assert client.get(path(zk_site))[1].version == before, "it was published"
            # Without the command.
            client.set(path(zk_site), json.dumps({**bad, "version": 3}).encode())
            wait_for(lambda problem=problem: problem in process.ask("refused()"), problem)
            assert process.ask("version()") == 2
            assert process.ask("place()") == "two"
            client.set(path(zk_site), json.dumps(document(2, "two")).encode())
            wait_for(lambda: process.ask("refused()") == "", "the good one again")
        assert all(problem in process.log for problem in BAD)
        done = zk_site.push({**document(2), **BAD["gap"]}, code=1)
        assert "gap" in done.err
        client.set(path(zk_site), json.dumps({**document(3), **BAD["gap"]}).encode())
        process.wait_log("version 3 is refused")
        shown = zk_site.topology("show", "--json", code=1).json
        assert (shown["version"], shown["origin"]) == (2, "last good copy")
        assert any("gap" in one for one in shown["problems"])
        # A good document repairs it.
        zk_site.topology("rollback", "1")
        process.wait_version(4)
        assert process.ask("place()") == "one"


def test_what_is_no_document_is_refused_and_replaced(zk_site: Site, client: KazooClient) -> None:
    zk_site.push(document(1))
    with zk_site.process() as process:
        client.set(path(zk_site), b"\xff{")
        process.wait_log("is not JSON")
        assert process.ask("place()") == "one"
        zk_site.push(document(1, "two"))
        process.wait_version(2)


def test_whatever_it_holds_the_next_one_is_followed(zk_site: Site, client: KazooClient) -> None:
    zk_site.push(document(1))
    with zk_site.process() as process:
        version = 1
        for problem, text in unusable_documents(50).items():
            client.set(path(zk_site), text.encode())
            process.wait_log(problem)
            assert process.ask("version()") == version
            version += 1
            client.set(path(zk_site), json.dumps(document(version, "two")).encode())
            process.wait_version(version)
            assert process.ask("place()") == "two"
        process.run(BREAK)
        client.set(path(zk_site), json.dumps(document(version + 1)).encode())
        process.wait_log("it cannot be used: ZeroDivisionError: a mistake of ours")
        assert (process.ask("version()"), process.ask("place()")) == (version, "two")
        process.run(MEND)
        client.set(path(zk_site), json.dumps(document(version + 2)).encode())
        process.wait_version(version + 2)
        assert "Exception in thread" not in process.log


def test_an_error_that_nobody_expects_does_not_end_the_following(zk_site: Site) -> None:
    zk_site.push(document(1))
    with zk_site.process() as process:
        process.run(
            "source = runtime.source()\n"
            "def fail(client):\n"
            "    del source._announce\n"
            "    raise ZeroDivisionError('a mistake of ours')\n"
            "source._announce = fail\n"
        )
        zk_site.push(document(1, "two"))
        process.wait_version(2)
        process.wait_log("a mistake of ours")
        # It reports its version when it has recovered.
        wait_for(lambda: zk_site.reported_version(process.popen.pid) == 2, "version 2 is reported")
        zk_site.push(document(2))
        process.wait_version(3)


def test_a_push_of_what_is_there_says_that_it_publishes_nothing(zk_site: Site) -> None:
    assert "No other process is connected." in zk_site.push(document(1)).out
    with zk_site.process():
        done = zk_site.push(document(1, "two"), "--comment", "kept")
        assert "Version 2 is published and in use here." in done.out
        assert "1 other process is connected, and uses it." in done.out
        again = document(2, "two")
        # The same content, written differently.
        again["groups"]["photos"]["RANGES"][0]["open"] = True
        done = zk_site.push(again, "--comment", "lost")
        assert "Nothing to publish: version 2, in use here, is the same." in done.out
        assert "is published" not in done.out
        assert "The comment is not kept: it would belong to a new version." in done.err
        # It waits for the others all the same.
        assert "1 other process is connected, and uses it." in done.out
        assert zk_site.push(again).err == ""
    entries = zk_site.topology("history", "--json").json
    assert [(entry["version"], entry["comment"]) for entry in entries] == [(2, "kept"), (1, "")]


def test_a_push_of_what_is_there_and_refused_is_no_success(
    zk_site: Site, client: KazooClient
) -> None:
    zk_site.push(document(1))
    bad = {**document(2), **BAD["gap"]}
    client.set(path(zk_site), json.dumps(bad).encode())
    done = zk_site.push(bad, code=1)
    assert "gap" in done.err
    assert "in use here" not in done.out
    # It is sound, and as old as the one in use: it gets a version that can be used.
    client.set(path(zk_site), json.dumps(document(1, "two")).encode())
    assert "Version 2 is published" in zk_site.push(document(1, "two")).out


def test_the_processes_are_shown_with_the_one_that_asks(zk_site: Site) -> None:
    zk_site.push(document(1))
    with zk_site.process() as process:
        processes_shown = zk_site.topology("show", "--json").json["processes"]
        assert [one["own"] for one in processes_shown if one["pid"] == process.popen.pid] == [False]
        lines = zk_site.topology("show").out.splitlines()
        (line,) = (line for line in lines if str(process.popen.pid) in line)
        assert not line.endswith("this command")
        own = "{process.pid for process in runtime.source().processes() if process.own}"
        wait_for(lambda: process.ask(f"list({own})") == [process.popen.pid], "it sees itself")


def test_an_older_version_is_refused(zk_site: Site, client: KazooClient) -> None:
    zk_site.push(document(1))
    zk_site.push(document(1, "two"))
    with zk_site.process() as process:
        assert "holds version 2 by now; this one was made from 1" in (
            zk_site.push(document(1, "one"), code=1).err
        )
        client.set(path(zk_site), json.dumps(document(1)).encode())
        process.wait_log("version 1 does not come after 2, which is in use")
        assert process.ask("place()") == "two"


def test_a_source_from_an_old_backup_is_not_published_anew_by_a_small_change(
    zk_site: Site, client: KazooClient
) -> None:
    zk_site.push(document(1))
    zk_site.push(document(1, "two"))
    with zk_site.process() as process:
        client.set(path(zk_site), json.dumps(document(1)).encode())
        assert "version 1 does not come after 2" in process.ask("refusal(change, 0, 0)")
        assert process.ask("version()") == 2
        assert process.ask("place()") == "two"


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
    assert "TopologyUnavailable: ZooKeeper at 127.0.0.1:1" in err
    assert "There is no last good copy" in err
    assert "does not answer" in zk_site.topology("show", code=1).err


def test_an_empty_tree_says_so_and_takes_a_first_push(zk_site: Site) -> None:
    done = zk_site.topology("show", code=1)
    assert "nothing was pushed there yet" in done.err
    zk_site.push(document(1))
    assert zk_site.topology("show", "--json").json["version"] == 1


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


def test_two_who_push_at_once_do_not_overwrite_each_other(zk_site: Site) -> None:
    zk_site.push(document(1))
    files = [
        zk_site.write(document(1, "two"), "a.json"),
        zk_site.write({**document(1), "nodes": {"two": {"CONN_MAX_AGE": 5}}}, "b.json"),
    ]
    pushers = [zk_site.start("topology", "push", file, "--wait", "0") for file in files]
    ends = [(*pusher.communicate(timeout=PATIENCE), pusher.returncode) for pusher in pushers]
    assert sorted(end[2] for end in ends) == [0, 1], ends
    (loser,) = (end for end in ends if end[2])
    assert "by now" in loser[1] or "at this moment" in loser[1]
    held = zk_site.topology("pull").json
    assert held["version"] == 2
    winner = json.loads(Path(files[[end[2] for end in ends].index(0)]).read_text())
    assert {**held, "version": 1} == winner


def test_changes_at_once_are_all_made(zk_site: Site) -> None:
    zk_site.push(document(1))
    with zk_site.processes(4) as processes:
        for number, process in enumerate(processes):
            process.send(f"for n in range(5): change({number}, n)")
        for process in processes:
            process.receive()
    held = zk_site.topology("pull").json
    assert held["version"] == 21
    changed = {**held["nodes"]["one"]["OPTIONS"], **held["nodes"]["two"]["OPTIONS"]}
    assert changed == {f"n{number}": 4 for number in range(4)}
    entries = zk_site.topology("history", "--limit", "50", "--json").json
    assert [entry["version"] for entry in entries] == list(range(21, 0, -1))


def test_a_process_that_ends_is_gone_from_the_list(zk_site: Site) -> None:
    zk_site.push(document(1))
    with zk_site.process() as process:
        process.end()
        pids = [one["pid"] for one in zk_site.topology("show", "--json").json["processes"]]
        assert process.popen.pid not in pids


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


def test_pull_edit_push_history_rollback_watch(zk_site: Site) -> None:
    zk_site.push(document(1), "--comment", "the first")
    pulled = zk_site.folder / "pulled.json"
    zk_site.topology("pull", str(pulled))
    content = json.loads(pulled.read_text())
    content["groups"]["photos"]["RANGES"][0]["primary"] = "two"
    assert zk_site.topology("diff", zk_site.write(content), code=1).out.strip() == (
        "group 'photos': range [0, 3]: primary 'one' becomes 'two'"
    )
    assert "may follow" in zk_site.topology("validate", zk_site.write(content)).out
    watcher = zk_site.start("topology", "watch", "--json")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["version"] == 1
    zk_site.push(content, "--comment", "to two")
    answer = json.loads(watcher.stdout.readline())
    assert (answer["version"], len(answer["changes"])) == (2, 1)
    zk_site.topology("rollback", "1", "--comment", "two was a mistake")
    assert json.loads(watcher.stdout.readline())["version"] == 3
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=PATIENCE)
    assert watcher.returncode == 0, err
    entries = zk_site.topology("history", "--json").json
    assert [(e["version"], e["comment"]) for e in entries] == [
        (3, "two was a mistake"), (2, "to two"), (1, "the first"),
    ]  # fmt: skip
    assert all(e["by"] and e["published_at"] for e in entries)
    assert "keeps no version 77" in zk_site.topology("rollback", "77", code=1).err
    assert zk_site.topology("diff", str(pulled)).out.strip() == "No difference."


def test_a_file_that_is_not_there_is_not_pushed(zk_site: Site) -> None:
    assert "cannot be read" in zk_site.topology("push", "nonesuch.json", code=1).err
