"""An import that is killed at any moment goes on without losing or doubling a row."""

from __future__ import annotations

import signal

import pytest

from tests.integration.imports.site import DEFINITIONS, MODELS, Site
from tests.integration.stopped_process import wait_until_stopped
from tests.patience import PATIENCE

#: In the middle of a transaction on a shard, after it, after a unit, between two rounds.
MOMENTS = [
    "insert:1", "insert:4", "stored:1", "stored:6", "done:1", "done:4", "planned:1", "planned:2",
    "round:1", "round:2",
]  # fmt: skip
_LEFT = """
from sharded_orm.models import OperationRun, OperationStep
print(OperationStep.objects.count() - OperationStep.objects.filter(run__kind='migrate').count(),
      OperationRun.objects.filter(kind='import worker').count(),
      sorted(set(OperationRun.objects.filter(kind='import').values_list('state', flat=True))))
"""


def killed(site: Site, moment: str, *options: str) -> None:
    done = site.python(
        "manage.py", "shards", "import", *MODELS, "--from", "default", "--rows", "6", *options,
        KILL_AT=moment,
    )  # fmt: skip
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_import_goes_on_after_a_kill(site: Site, moment: str) -> None:
    site.fill()
    killed(site, moment)
    report = site.copy("--rows", "6", "--json").json
    assert report["ok"], report
    assert site.ids() == list(range(1, 41))
    site.copy("--verify")
    assert site.run(_LEFT) == "0 0 ['done']"


def test_kills_one_after_the_other(site: Site) -> None:
    site.fill()
    for moment in MOMENTS[:6]:
        killed(site, moment)
    site.copy("--rows", "6")
    site.copy("--verify")
    assert site.ids() == list(range(1, 41))


def test_the_same_command_in_several_processes_shares_the_work(site: Site) -> None:
    site.fill(161)
    command = [
        "manage.py",
        "shards",
        "import",
        *MODELS,
        "--from",
        "default",
        "--rows",
        "3",
        "--json",
    ]
    processes = [site.start(*command) for _ in range(3)]
    # One of them is killed as soon as it has taken part.
    dying = site.start(*command, KILL_AT="done:2")
    dying.communicate(timeout=PATIENCE)
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert site.ids() == list(range(1, 161))
    # The killed process may have come last, and have begun a run of its own.
    site.copy()
    site.copy("--verify")
    assert site.run(_LEFT) == "0 0 ['done']"


def test_other_arguments_while_an_import_is_under_way(site: Site) -> None:
    site.fill()
    killed(site, "done:1")
    # The broken import is given up: its rows are there, and are found equal.
    report = site.copy("--json", models=["library.Book", "library.Topic"]).json
    assert report["ok"]
    assert site.ids() == list(range(1, 41))


def test_a_stopped_import_goes_on(site: Site) -> None:
    site.fill(161)
    process = site.start(
        "manage.py", "shards", "import", *MODELS, "--from", "default", "--rows", "1", "-v", "2"
    )
    assert process.stderr is not None
    assert "library" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "the same command goes on from here" in err
    site.copy()
    site.copy("--verify")


def test_the_site_writes_meanwhile(site: Site) -> None:
    site.fill()
    writer = site.start(
        "run",
        "from tests.integration.imports.library.models import *\n"
        "from tests.integration.imports.site import PREAMBLE\n"
        "exec(PREAMBLE)\n" + DEFINITIONS + "import os, sys\n"
        "for pk in range(1000, 1300):\n"
        "    insert(Book, [book(pk)])\n"
        "    if pk == 1010: print('begun', flush=True)\n",
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    site.manage("shards", "import", *MODELS, "--from", "default", "--rounds", "50")
    _, err = writer.communicate(timeout=PATIENCE)
    assert writer.returncode == 0, err
    report = site.copy("--json").json
    assert report["ok"]
    assert site.ids() == [*range(1, 41), *range(1000, 1300)]
    site.copy("--verify")


def test_the_state_of_an_import_that_is_under_way_and_of_a_killed_one(site: Site) -> None:
    site.fill(161)
    state = (
        "from sharded_orm.operations.runs.journal import last_run\n"
        "run = last_run('import', 'books'); print(run.state, run.held)"
    )
    process = site.start(
        "manage.py",
        "shards",
        "import",
        *MODELS,
        "--from",
        "default",
        "--rows",
        "1",
        STOP_AT="done:1",
    )
    wait_until_stopped(process)
    assert site.run(state) == "running True"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert site.run(state) == "broken off False"
    site.copy()
    assert site.run(state) == "done False"
