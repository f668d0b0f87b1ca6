"""A topology in ZooKeeper: pushed to every process, and never lost with the servers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl_credential

from tests.integration.topology.conftest import scene_with_zookeeper
from tests.integration.topology.scene import (
    BREAK,
    MEND,
    Scene,
    document,
    untakeable,
    wait_for,
)
from tests.patience import PATIENCE
from tests.services.proxy import Proxy
from tests.services.zookeeper import ZooKeeperServer

PROCESSES = 20


@pytest.fixture
def client(zookeeper: ZooKeeperServer) -> Iterator[KazooClient]:
    """Somebody else who speaks with the server."""
    made = KazooClient(zookeeper.hosts)
    made.start()
    yield made
    made.stop()
    made.close()


def path(scene: Scene, below: str = "current") -> str:
    return f"{scene.source['OPTIONS']['PATH']}/{below}"


def test_a_push_reaches_twenty_processes(zk_scene: Scene) -> None:
    zk_scene.push(document(1))
    with zk_scene.sites(PROCESSES) as sites:
        assert {site.ask("place()") for site in sites} == {"one"}
        done = zk_scene.push(document(1, "two"), "--wait", "60")
        # All of them; the command itself is none that had to follow.
        assert f"{PROCESSES} other processes are connected, and use it." in done.out
        assert {site.ask("place()") for site in sites} == {"two"}
        told = zk_scene.topology("show", "--json").json["processes"]
        assert {one["version"] for one in told} == {2}
        assert {one["pid"] for one in told} >= {site.process.pid for site in sites}


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
    zk_scene: Scene, client: KazooClient
) -> None:
    zk_scene.push(document(1))
    zk_scene.push(document(1, "two"))
    with zk_scene.site() as site:
        for problem, wrong in BAD.items():
            bad = {**document(2), **wrong}
            before = client.get(path(zk_scene))[1].version
            # What the command does, and what it would say.
            assert problem in site.ask(f"push({bad!r})"), problem
            assert client.get(path(zk_scene))[1].version == before, "it was published"
            # Past the command.
            client.set(path(zk_scene), json.dumps({**bad, "version": 3}).encode())
            wait_for(lambda problem=problem: problem in site.ask("refused()"), problem)
            assert site.ask("version()") == 2
            assert site.ask("place()") == "two"
            client.set(path(zk_scene), json.dumps(document(2, "two")).encode())
            wait_for(lambda: site.ask("refused()") == "", "the good one again")
        assert all(problem in site.log for problem in BAD)
        done = zk_scene.push({**document(2), **BAD["gap"]}, code=1)
        assert "gap" in done.err
        client.set(path(zk_scene), json.dumps({**document(3), **BAD["gap"]}).encode())
        site.wait_log("version 3 is refused")
        shown = zk_scene.topology("show", "--json", code=1).json
        assert (shown["version"], shown["origin"]) == (2, "last good copy")
        assert any("gap" in one for one in shown["problems"])
        # A good one mends it.
        zk_scene.topology("rollback", "1")
        site.wait_version(4)
        assert site.ask("place()") == "one"


def test_what_is_no_document_is_refused_and_replaced(zk_scene: Scene, client: KazooClient) -> None:
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        client.set(path(zk_scene), b"\xff{")
        site.wait_log("is not JSON")
        assert site.ask("place()") == "one"
        zk_scene.push(document(1, "two"))
        site.wait_version(2)


def test_whatever_it_holds_the_next_one_is_followed(zk_scene: Scene, client: KazooClient) -> None:
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        version = 1
        for problem, text in untakeable(50).items():
            client.set(path(zk_scene), text.encode())
            site.wait_log(problem)
            assert site.ask("version()") == version
            version += 1
            client.set(path(zk_scene), json.dumps(document(version, "two")).encode())
            site.wait_version(version)
            assert site.ask("place()") == "two"
        site.run(BREAK)
        client.set(path(zk_scene), json.dumps(document(version + 1)).encode())
        site.wait_log("it cannot be used: ZeroDivisionError: a mistake of ours")
        assert (site.ask("version()"), site.ask("place()")) == (version, "two")
        site.run(MEND)
        client.set(path(zk_scene), json.dumps(document(version + 2)).encode())
        site.wait_version(version + 2)
        assert "Exception in thread" not in site.log


def test_an_error_that_nobody_expects_does_not_end_the_following(zk_scene: Scene) -> None:
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        site.run(
            "source = runtime.source()\n"
            "def fail(client):\n"
            "    del source._announce\n"
            "    raise ZeroDivisionError('a mistake of ours')\n"
            "source._announce = fail\n"
        )
        zk_scene.push(document(1, "two"))
        site.wait_version(2)
        site.wait_log("a mistake of ours")
        # It tells its version when it has recovered.
        wait_for(lambda: zk_scene.told_version(site.process.pid) == 2, "version 2 was told")
        zk_scene.push(document(2))
        site.wait_version(3)


def test_a_push_of_what_is_there_says_that_it_publishes_nothing(zk_scene: Scene) -> None:
    assert "No other process is connected." in zk_scene.push(document(1)).out
    with zk_scene.site():
        done = zk_scene.push(document(1, "two"), "--comment", "kept")
        assert "Version 2 is published and in use here." in done.out
        assert "1 other process is connected, and uses it." in done.out
        again = document(2, "two")
        # The same in other words.
        again["groups"]["photos"]["RANGES"][0]["open"] = True
        done = zk_scene.push(again, "--comment", "lost")
        assert "Nothing to publish: version 2, in use here, is the same." in done.out
        assert "is published" not in done.out
        assert "The comment is not kept: it would belong to a new version." in done.err
        # It waits for the others all the same.
        assert "1 other process is connected, and uses it." in done.out
        assert zk_scene.push(again).err == ""
    entries = zk_scene.topology("history", "--json").json
    assert [(entry["version"], entry["comment"]) for entry in entries] == [(2, "kept"), (1, "")]


def test_a_push_of_what_is_there_and_refused_is_no_success(
    zk_scene: Scene, client: KazooClient
) -> None:
    zk_scene.push(document(1))
    bad = {**document(2), **BAD["gap"]}
    client.set(path(zk_scene), json.dumps(bad).encode())
    done = zk_scene.push(bad, code=1)
    assert "gap" in done.err
    assert "in use here" not in done.out
    # Sound, and as old as what is in use: it gets a version that can be used.
    client.set(path(zk_scene), json.dumps(document(1, "two")).encode())
    assert "Version 2 is published" in zk_scene.push(document(1, "two")).out


def test_the_processes_are_shown_with_the_one_that_asks(zk_scene: Scene) -> None:
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        told = zk_scene.topology("show", "--json").json["processes"]
        assert [one["own"] for one in told if one["pid"] == site.process.pid] == [False]
        lines = zk_scene.topology("show").out.splitlines()
        (line,) = (line for line in lines if str(site.process.pid) in line)
        assert not line.endswith("this command")
        own = "{process.pid for process in runtime.source().processes() if process.own}"
        wait_for(lambda: site.ask(f"list({own})") == [site.process.pid], "it sees itself")


def test_an_older_version_is_refused(zk_scene: Scene, client: KazooClient) -> None:
    zk_scene.push(document(1))
    zk_scene.push(document(1, "two"))
    with zk_scene.site() as site:
        assert "holds version 2 by now; this one was made from 1" in (
            zk_scene.push(document(1, "one"), code=1).err
        )
        client.set(path(zk_scene), json.dumps(document(1)).encode())
        site.wait_log("version 1 does not come after 2, which is in use")
        assert site.ask("place()") == "two"


def test_a_source_from_an_old_backup_is_not_published_anew_by_a_small_change(
    zk_scene: Scene, client: KazooClient
) -> None:
    zk_scene.push(document(1))
    zk_scene.push(document(1, "two"))
    with zk_scene.site() as site:
        client.set(path(zk_scene), json.dumps(document(1)).encode())
        assert "version 1 does not come after 2" in site.ask("refusal(change, 0, 0)")
        assert site.ask("version()") == 2
        assert site.ask("place()") == "two"


def test_servers_that_come_back_are_found_again(
    zk_scene: Scene, zookeeper: ZooKeeperServer
) -> None:
    zk_scene.push(document(1))
    with zk_scene.sites(3) as sites:
        zookeeper.kill()
        try:
            for site in sites:
                site.wait_log("this process goes on with version 1")
                assert site.ask("place()") == "one"
        finally:
            zookeeper.start()
        zk_scene.push(document(1, "two"))
        for site in sites:
            site.wait_version(2)
            assert site.ask("place()") == "two"
            assert "answers again" in site.log


def test_a_start_without_servers_uses_the_last_good_copy(
    zk_scene: Scene, zookeeper: ZooKeeperServer
) -> None:
    zk_scene.push(document(1, "two"))
    zk_scene.source["OPTIONS"]["WAIT"] = 0.5
    zk_scene.save()
    zookeeper.kill()
    try:
        with zk_scene.site() as site:
            assert site.ask("place()") == "two"
            assert (
                f"Going on with the last good copy in {zk_scene.last_good}: version 1" in site.log
            )
            shown = zk_scene.topology("show", "--json", code=1).json
            assert (shown["version"], shown["origin"]) == (1, "last good copy")
            zookeeper.start()
            zk_scene.source["OPTIONS"]["WAIT"] = 20
            zk_scene.save()
            pid = site.process.pid
            wait_for(lambda: zk_scene.told_version(pid) == 1, "it tells its version")
            zk_scene.push(document(1, "one"))
            site.wait_version(2)
            assert site.ask("place()") == "one"
    finally:
        if zookeeper.pid is None:
            zookeeper.start()


def test_without_a_copy_and_without_servers_nothing_starts(
    zk_scene: Scene, zookeeper: ZooKeeperServer
) -> None:
    zk_scene.source["OPTIONS"].update(HOSTS="127.0.0.1:1", WAIT=0.2)
    zk_scene.save()
    process = zk_scene.start("check")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "TopologyUnavailable: ZooKeeper at 127.0.0.1:1" in err
    assert "There is no last good copy" in err
    assert "does not answer" in zk_scene.topology("show", code=1).err


def test_an_empty_tree_says_so_and_takes_a_first_push(zk_scene: Scene) -> None:
    done = zk_scene.topology("show", code=1)
    assert "nothing was pushed there yet" in done.err
    zk_scene.push(document(1))
    assert zk_scene.topology("show", "--json").json["version"] == 1


def test_a_session_that_expires_is_made_anew(zk_scene: Scene, zookeeper: ZooKeeperServer) -> None:
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        # Who connects with a session's id and closes it ends it for all.
        session, password = site.ask("session()")
        thief = KazooClient(zookeeper.hosts, client_id=(session, bytes.fromhex(password)))
        thief.start()
        thief.stop()
        thief.close()
        site.wait_log("this process goes on with version 1")
        zk_scene.push(document(1, "two"))
        site.wait_version(2)
        assert site.ask("session()")[0] != session
        # It is announced again.
        wait_for(
            lambda: any(
                one["pid"] == site.process.pid and one["version"] == 2
                for one in zk_scene.topology("show", "--json").json["processes"]
            ),
            "the process among those connected",
        )


def test_a_partition_heals(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> None:
    with Proxy(*zookeeper.hosts.split(":")[:1], zookeeper.port) as proxy:
        direct = scene_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts)
        direct.push(document(1))
        behind = scene_with_zookeeper(tmp_path, sqlite_nodes, f"{proxy.host}:{proxy.port}")
        with behind.site() as site:
            direct.save()
            proxy.stall()
            direct.push(document(1, "two"), "--wait", "0")
            site.wait_log("this process goes on with version 1")
            assert site.ask("place()") == "one"
            proxy.forward()
            site.wait_version(2)
            assert site.ask("place()") == "two"


def test_two_who_push_at_once_do_not_overwrite_each_other(zk_scene: Scene) -> None:
    zk_scene.push(document(1))
    files = [
        zk_scene.write(document(1, "two"), "a.json"),
        zk_scene.write({**document(1), "nodes": {"two": {"CONN_MAX_AGE": 5}}}, "b.json"),
    ]
    pushers = [zk_scene.start("topology", "push", file, "--wait", "0") for file in files]
    ends = [(*pusher.communicate(timeout=PATIENCE), pusher.returncode) for pusher in pushers]
    assert sorted(end[2] for end in ends) == [0, 1], ends
    (loser,) = (end for end in ends if end[2])
    assert "by now" in loser[1] or "at this moment" in loser[1]
    held = zk_scene.topology("pull").json
    assert held["version"] == 2
    winner = json.loads(Path(files[[end[2] for end in ends].index(0)]).read_text())
    assert {**held, "version": 1} == winner


def test_changes_at_once_are_all_made(zk_scene: Scene) -> None:
    zk_scene.push(document(1))
    with zk_scene.sites(4) as sites:
        for number, site in enumerate(sites):
            site.send(f"for n in range(5): change({number}, n)")
        for site in sites:
            site.receive()
    held = zk_scene.topology("pull").json
    assert held["version"] == 21
    changed = {**held["nodes"]["one"]["OPTIONS"], **held["nodes"]["two"]["OPTIONS"]}
    assert changed == {f"n{number}": 4 for number in range(4)}
    entries = zk_scene.topology("history", "--limit", "50", "--json").json
    assert [entry["version"] for entry in entries] == list(range(21, 0, -1))


def test_a_process_that_ends_is_gone_from_the_list(zk_scene: Scene) -> None:
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        site.end()
        pids = [one["pid"] for one in zk_scene.topology("show", "--json").json["processes"]]
        assert site.process.pid not in pids


def test_a_forked_worker_follows_by_itself(zk_scene: Scene) -> None:
    """As gunicorn does with preload_app: the parent has loaded everything, and serves too."""
    zk_scene.push(document(1))
    with zk_scene.site() as site:
        assert site.ask("place()") == "one"
        child = site.ask("fork()")
        assert site.ask("of_child('place()')") == "one"
        wait_for(lambda: zk_scene.told_version(child) == 1, "the child tells its version")
        zk_scene.push(document(1, "two"))
        for ask in (site.ask, lambda text: site.ask(f"of_child({text!r})")):
            wait_for(lambda ask=ask: ask("version()") == 2, "version 2 in use")
            assert ask("place()") == "two"
        assert site.ask("of_child('session()')")[0] != site.ask("session()")[0]
        told = zk_scene.topology("show", "--json").json["processes"]
        assert {child, site.process.pid} <= {one["pid"] for one in told}
        # The end of the child does not end the parent's session.
        session = site.ask("session()")
        site.run("of_child('end')")
        zk_scene.push(document(2, "one"))
        site.wait_version(3)
        assert site.ask("session()") == session


def test_a_worker_that_is_forked_while_servers_are_down_has_what_its_parent_had(
    zk_scene: Scene, zookeeper: ZooKeeperServer
) -> None:
    zk_scene.push(document(1, "two"))
    with zk_scene.site() as site:
        zookeeper.kill()
        try:
            site.ask("fork()")
            assert site.ask("of_child('place()')") == "two"
        finally:
            zookeeper.start()
        zk_scene.push(document(1, "one"))
        wait_for(lambda: site.ask("of_child('version()')") == 2, "version 2 in use")


def test_acl_and_authentication(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> None:
    digest = make_digest_acl_credential("operator", "s3cret")
    acl = [["digest", digest, "cdrwa"], ["world", "anyone", "r"]]
    owner = scene_with_zookeeper(
        tmp_path, sqlite_nodes, zookeeper.hosts, ACL=acl, AUTH=[["digest", "operator:s3cret"]]
    )
    owner.push(document(1))
    reader = scene_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts)
    with reader.site() as site:
        assert site.ask("place()") == "one"
        done = reader.push(document(1, "two"), code=1)
        assert "its ACL wants another AUTH" in done.err
        owner.save()
        done = owner.push(document(1, "two"))
        site.wait_version(2)
        for text in (site.log, done.out, done.err, owner.last_good.read_text()):
            assert "s3cret" not in text


def test_credentials_are_published_when_that_is_wanted(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> None:
    scene = scene_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts, CREDENTIALS=True)
    secret = {**document(1), "nodes": {"two": {"USER": "app", "PASSWORD": "s3cret"}}}
    scene.push(secret)
    changed = {**document(1), "nodes": {"two": {"USER": "app", "PASSWORD": "s3cret2"}}}
    shown = scene.topology("diff", scene.write(changed), code=1).out
    assert "node 'two': PASSWORD changes" in shown
    outputs = [shown, scene.topology("show").out, scene.topology("show", "--json").out]
    done = scene.push(changed)
    assert all("s3cret" not in text for text in [*outputs, done.out, done.err])
    assert scene.last_good.stat().st_mode & 0o777 == 0o600


def test_pull_edit_push_history_rollback_watch(zk_scene: Scene) -> None:
    zk_scene.push(document(1), "--comment", "the first")
    pulled = zk_scene.folder / "pulled.json"
    zk_scene.topology("pull", str(pulled))
    content = json.loads(pulled.read_text())
    content["groups"]["photos"]["RANGES"][0]["primary"] = "two"
    assert zk_scene.topology("diff", zk_scene.write(content), code=1).out.strip() == (
        "group 'photos': range [0, 3]: primary 'one' becomes 'two'"
    )
    assert "may follow" in zk_scene.topology("validate", zk_scene.write(content)).out
    watcher = zk_scene.start("topology", "watch", "--json")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["version"] == 1
    zk_scene.push(content, "--comment", "to two")
    told = json.loads(watcher.stdout.readline())
    assert (told["version"], len(told["changes"])) == (2, 1)
    zk_scene.topology("rollback", "1", "--comment", "two was a mistake")
    assert json.loads(watcher.stdout.readline())["version"] == 3
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=PATIENCE)
    assert watcher.returncode == 0, err
    entries = zk_scene.topology("history", "--json").json
    assert [(e["version"], e["comment"]) for e in entries] == [
        (3, "two was a mistake"), (2, "to two"), (1, "the first"),
    ]  # fmt: skip
    assert all(e["by"] and e["published_at"] for e in entries)
    assert "keeps no version 77" in zk_scene.topology("rollback", "77", code=1).err
    assert zk_scene.topology("diff", str(pulled)).out.strip() == "No difference."


def test_a_file_that_is_not_there_is_not_pushed(zk_scene: Scene) -> None:
    assert "cannot be read" in zk_scene.topology("push", "nonesuch.json", code=1).err
