"""A topology that is published to every process: in ZooKeeper and in the global database."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.integration.topology.conftest import PublishedSite
from tests.integration.topology.site import BREAK, MEND, document, unusable_documents, wait_for
from tests.patience import PATIENCE


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
    published: PublishedSite,
) -> None:
    published.push(document(1))
    published.push(document(1, "two"))
    with published.process() as process:
        for problem, wrong in BAD.items():
            bad = {**document(2), **wrong}
            before = published.writes()
            # The operation as the command calls it, and its error.
            assert problem in process.ask(f"push({bad!r})"), problem
            assert published.writes() == before, "it was published"
            # Without the command.
            published.hold(json.dumps({**bad, "version": 3}))
            wait_for(lambda problem=problem: problem in process.ask("refused()"), problem)
            assert process.ask("version()") == 2
            assert process.ask("place()") == "two"
            published.hold(json.dumps(document(2, "two")))
            wait_for(lambda: process.ask("refused()") == "", "the good one again")
        assert all(problem in process.log for problem in BAD)
        done = published.push({**document(2), **BAD["gap"]}, code=1)
        assert "gap" in done.err
        published.hold(json.dumps({**document(3), **BAD["gap"]}))
        process.wait_log("version 3 is refused")
        shown = published.topology("show", "--json", code=1).json
        assert (shown["version"], shown["origin"]) == (2, "last good copy")
        assert any("gap" in one for one in shown["problems"])
        # A good document repairs it.
        published.topology("rollback", "1")
        process.wait_version(4)
        assert process.ask("place()") == "one"


def test_what_is_no_document_is_refused_and_replaced(published: PublishedSite) -> None:
    published.push(document(1))
    with published.process() as process:
        published.hold("{")
        process.wait_log("is not JSON")
        assert process.ask("place()") == "one"
        published.push(document(1, "two"))
        process.wait_version(2)


def test_whatever_it_holds_the_next_one_is_followed(published: PublishedSite) -> None:
    published.push(document(1))
    with published.process() as process:
        version = 1
        for problem, text in unusable_documents(50).items():
            published.hold(text)
            process.wait_log(problem)
            assert process.ask("version()") == version
            version += 1
            published.hold(json.dumps(document(version, "two")))
            process.wait_version(version)
            assert process.ask("place()") == "two"
        process.run(BREAK)
        published.hold(json.dumps(document(version + 1)))
        process.wait_log("it cannot be used: ZeroDivisionError: a mistake of ours")
        assert (process.ask("version()"), process.ask("place()")) == (version, "two")
        process.run(MEND)
        published.hold(json.dumps(document(version + 2)))
        process.wait_version(version + 2)
        assert "Exception in thread" not in process.log


def test_an_error_that_nobody_expects_does_not_end_the_following(published: PublishedSite) -> None:
    published.push(document(1))
    with published.process() as process:
        process.run(
            "source = runtime.source()\n"
            "def fail(client):\n"
            "    del source._announce\n"
            "    raise ZeroDivisionError('a mistake of ours')\n"
            "source._announce = fail\n"
        )
        published.push(document(1, "two"))
        process.wait_version(2)
        process.wait_log("a mistake of ours")
        # It reports its version when it has recovered.
        wait_for(
            lambda: published.reported_version(process.popen.pid) == 2, "version 2 is reported"
        )
        published.push(document(2))
        process.wait_version(3)


def test_a_push_of_what_is_there_says_that_it_publishes_nothing(published: PublishedSite) -> None:
    assert "No other process is connected." in published.push(document(1)).out
    with published.process() as process:
        wait_for(
            lambda: published.reported_version(process.popen.pid) == 1, "version 1 is reported"
        )
        done = published.push(document(1, "two"), "--comment", "kept")
        assert "Version 2 is published and in use here." in done.out
        assert "1 other process is connected, and uses it." in done.out
        again = document(2, "two")
        # The same content, written differently.
        again["groups"]["photos"]["RANGES"][0]["open"] = True
        done = published.push(again, "--comment", "lost")
        assert "Nothing to publish: version 2, in use here, is the same." in done.out
        assert "is published" not in done.out
        assert "The comment is not kept: it would belong to a new version." in done.err
        # It waits for the others all the same.
        assert "1 other process is connected, and uses it." in done.out
        assert published.push(again).err == ""
    entries = published.topology("history", "--json").json
    assert [(entry["version"], entry["comment"]) for entry in entries] == [(2, "kept"), (1, "")]


def test_a_push_of_what_is_there_and_refused_is_no_success(published: PublishedSite) -> None:
    published.push(document(1))
    bad = {**document(2), **BAD["gap"]}
    published.hold(json.dumps(bad))
    done = published.push(bad, code=1)
    assert "gap" in done.err
    assert "in use here" not in done.out
    # It is sound, and as old as the one in use: it gets a version that can be used.
    published.hold(json.dumps(document(1, "two")))
    assert "Version 2 is published" in published.push(document(1, "two")).out


def test_the_processes_are_shown_with_the_one_that_asks(published: PublishedSite) -> None:
    published.push(document(1))
    with published.process() as process:
        processes_shown = published.topology("show", "--json").json["processes"]
        assert [one["own"] for one in processes_shown if one["pid"] == process.popen.pid] == [False]
        lines = published.topology("show").out.splitlines()
        (line,) = (line for line in lines if str(process.popen.pid) in line)
        assert not line.endswith("this command")
        own = "{process.pid for process in runtime.source().processes() if process.own}"
        wait_for(lambda: process.ask(f"list({own})") == [process.popen.pid], "it sees itself")


def test_an_older_version_is_refused(published: PublishedSite) -> None:
    published.push(document(1))
    published.push(document(1, "two"))
    with published.process() as process:
        assert "holds version 2 by now; this one was made from 1" in (
            published.push(document(1, "one"), code=1).err
        )
        published.hold(json.dumps(document(1)))
        process.wait_log("version 1 does not come after 2, which is in use")
        assert process.ask("place()") == "two"


def test_a_source_from_an_old_backup_is_not_published_anew_by_a_small_change(
    published: PublishedSite,
) -> None:
    published.push(document(1))
    published.push(document(1, "two"))
    with published.process() as process:
        published.hold(json.dumps(document(1)))
        assert "version 1 does not come after 2" in process.ask("refusal(change, 0, 0)")
        assert process.ask("version()") == 2
        assert process.ask("place()") == "two"


def test_an_empty_source_says_so_and_takes_a_first_push(published: PublishedSite) -> None:
    done = published.topology("show", code=1)
    assert "nothing was pushed there yet" in done.err
    process = published.start("migrate_shards")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.startswith("CommandError: ")
    assert "'manage.py topology push FILE'" in err
    assert "Traceback" not in err
    for arguments in (["help", "topology"], ["help"], ["--help"]):
        process = published.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        assert "topology" in out
    published.push(document(1))
    assert published.topology("show", "--json").json["version"] == 1


def test_two_who_push_at_once_do_not_overwrite_each_other(published: PublishedSite) -> None:
    published.push(document(1))
    files = [
        published.write(document(1, "two"), "a.json"),
        published.write({**document(1), "nodes": {"two": {"CONN_MAX_AGE": 5}}}, "b.json"),
    ]
    pushers = [published.start("topology", "push", file, "--wait", "0") for file in files]
    ends = [(*pusher.communicate(timeout=PATIENCE), pusher.returncode) for pusher in pushers]
    assert sorted(end[2] for end in ends) == [0, 1], ends
    (loser,) = (end for end in ends if end[2])
    assert "by now" in loser[1] or "at this moment" in loser[1]
    held = published.topology("pull").json
    assert held["version"] == 2
    winner = json.loads(Path(files[[end[2] for end in ends].index(0)]).read_text())
    assert {**held, "version": 1} == winner


def test_changes_at_once_are_all_made(published: PublishedSite) -> None:
    published.push(document(1))
    with published.processes(4) as processes:
        for number, process in enumerate(processes):
            process.send(f"for n in range(5): change({number}, n)")
        for process in processes:
            process.receive()
    held = published.topology("pull").json
    assert held["version"] == 21
    changed = {**held["nodes"]["one"]["OPTIONS"], **held["nodes"]["two"]["OPTIONS"]}
    assert changed == {f"n{number}": 4 for number in range(4)}
    entries = published.topology("history", "--limit", "50", "--json").json
    assert [entry["version"] for entry in entries] == list(range(21, 0, -1))


def test_a_process_that_ends_is_gone_from_the_list(published: PublishedSite) -> None:
    published.push(document(1))
    with published.process() as process:
        process.end()
        pids = [one["pid"] for one in published.topology("show", "--json").json["processes"]]
        assert process.popen.pid not in pids


def test_pull_edit_push_history_rollback_watch(published: PublishedSite) -> None:
    published.push(document(1), "--comment", "the first")
    pulled = published.folder / "pulled.json"
    published.topology("pull", str(pulled))
    content = json.loads(pulled.read_text())
    content["groups"]["photos"]["RANGES"][0]["primary"] = "two"
    assert published.topology("diff", published.write(content), code=1).out.strip() == (
        "group 'photos': range [0, 3]: primary 'one' becomes 'two'"
    )
    assert "may follow" in published.topology("validate", published.write(content)).out
    watcher = published.start("topology", "watch", "--json")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["version"] == 1
    published.push(content, "--comment", "to two")
    answer = json.loads(watcher.stdout.readline())
    assert (answer["version"], len(answer["changes"])) == (2, 1)
    published.topology("rollback", "1", "--comment", "two was a mistake")
    assert json.loads(watcher.stdout.readline())["version"] == 3
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=PATIENCE)
    assert watcher.returncode == 0, err
    entries = published.topology("history", "--json").json
    assert [(e["version"], e["comment"]) for e in entries] == [
        (3, "two was a mistake"), (2, "to two"), (1, "the first"),
    ]  # fmt: skip
    assert all(e["by"] and e["published_at"] for e in entries)
    assert "keeps no version 77" in published.topology("rollback", "77", code=1).err
    assert published.topology("diff", str(pulled)).out.strip() == "No difference."
