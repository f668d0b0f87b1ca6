"""Pages of runs of operations, during and after the run."""

from __future__ import annotations

import pytest

from tests.admin.fleet.site import RUNS, Site

# Runs in the process of the site: an operation that a page can follow.
BEGIN = """
import threading
from sharded_orm.operations.runs import journal
from tests.patience import PATIENCE

class Running(threading.Thread):
    def __init__(self, subject, aliases):
        super().__init__(daemon=True)
        self.subject, self.aliases = subject, aliases
        self.ready, self.over = threading.Event(), threading.Event()

    def run(self):
        from django.db import connections
        with journal.hold_run("migrate", self.subject, {"targets": ["photos.0002"], "fake": False}) as run:
            self.id = run.id
            run.create_steps(self.aliases)
            first, second, third = (run.step(alias) for alias in self.aliases[:3])
            first.begin(migration="photos_app.0001_initial")
            first.mark_done()
            second.mark_failed(ValueError("no <b>way</b> for 'site'@'10.0.0.7'"))
            third.begin(migration="photos_app.0001_initial", operation="CREATE TABLE x", position={"n": 1})
            self.ready.set()
            self.over.wait(PATIENCE)
            run.finish("failed", "not migrated: 1 of 300 shards")
        connections.close_all()

import sharded_orm
sharded_orm.test_run = run = Running({subject!r}, {aliases!r})
run.start()
run.ready.wait(PATIENCE)
result = run.id
"""
END = (
    "import sharded_orm; sharded_orm.test_run.over.set(); from tests.patience import PATIENCE;"
    " sharded_orm.test_run.join(PATIENCE)"
)


@pytest.fixture
def run(site: Site) -> int:
    """A run on 300 shards: one is done, one has failed, one is running."""
    aliases = ["photos_00000", "photos_00001", *(f"old_{n:05d}" for n in range(298))]
    begun = BEGIN.replace("{subject!r}", "'watched'").replace("{aliases!r}", repr(aliases))
    run_id: int = site.run(begun)
    return run_id


def test_a_run_is_watched_until_its_end(site: Site, run: int) -> None:
    try:
        listed = site.get(RUNS)
        assert f"migrate watched, run {run} running 2 % 2 of 300 1" in listed.text.replace(
            "1 %", "2 %"
        )
        page = site.get(f"{RUNS}{run}/change/")
        assert "State running" in page.text
        assert "At work on old_00000: photos_app.0001_initial" in page.text
        assert "targets photos.0002" in page.text and "fake no" in page.text
        assert "sharded_orm/fleet.js" in page.body
        progress = site.get(f"{RUNS}{run}/progress/")
        assert progress.json() == {
            "state": "running",
            "live": True,
            "counts": {"pending": 297, "done": 1, "failed": 1, "running": 1},
            "ended": 2,
            "total": 300,
            "percent": 1,
            "busy": ["old_00000: photos_app.0001_initial"],
        }
        # Queries for session, user, run, counts, running steps.
        assert len(progress.queries["default"]) == 5
    finally:
        site.run(END)
    page = site.get(f"{RUNS}{run}/change/")
    assert "State failed Cause not migrated: 1 of 300 shards" in page.text
    assert "fleet.js" not in page.body
    assert site.get(f"{RUNS}{run}/progress/").json()["live"] is False


def test_steps_are_paged_and_failures_have_a_cause_and_a_command(site: Site, run: int) -> None:
    site.run(END)
    first = site.get(f"{RUNS}{run}/change/")
    assert first.body.count('<th scope="row">') == 100
    assert "1 of 3" in first.text
    last = site.get(f"{RUNS}{run}/change/?page=3")
    assert "photos_00001" in last.text
    assert "/admin/sharded_orm/shardmap/shard/photos_00001/" in last.links
    # A shard that does not exist any more has no page.
    assert not [link for link in first.links if "old_" in link]
    failed = site.get(f"{RUNS}{run}/change/?state=failed")
    assert failed.body.count('<th scope="row">') == 1
    assert "ValueError: no <b>way</b> for this account" in failed.text
    assert "<b>way</b>" not in failed.body
    assert "manage.py migrate_shards --group watched --retry-failed" in failed.text
    # Queries for session, user, run, counts, steps.
    assert len(failed.queries["default"]) == 5
    assert site.get(f"{RUNS}{run}/change/?state=nothing").status == 200
    assert "photos_00001" in site.get(f"{RUNS}{run}/change/?page=99").text


def test_the_pages_of_one_state_stay_with_it(site: Site, run: int) -> None:
    site.run(END)
    pending = site.get(f"{RUNS}{run}/change/?state=pending")
    assert "1 of 3" in pending.text
    (following,) = (link for link in pending.links if "page=2" in link)
    assert following == "?state=pending&page=2"
    last = site.get(f"{RUNS}{run}/change/?state=pending&page=3")
    assert last.body.count('<th scope="row">') == 97
    assert "photos_00001" not in last.text


def test_without_the_journal_there_are_no_runs(site: Site) -> None:
    tables = ("sharded_orm_script", "sharded_orm_step", "sharded_orm_run")
    rename = (
        "from django.db import connection\n"
        "with connection.cursor() as cursor:\n"
        "    for table in {tables!r}:\n"
        "        cursor.execute(f'ALTER TABLE {before} RENAME TO {after}')"
    )
    there = rename.replace("{tables!r}", repr(tables))
    site.run(there.replace("{before}", "{table}").replace("{after}", "away_{table}"))
    try:
        assert "manage.py migrate sharded_orm" in site.get(RUNS).text
        assert site.get(f"{RUNS}1/change/").status == 404
        assert site.get(f"{RUNS}1/progress/").status == 404
        shard = site.get("/admin/sharded_orm/shardmap/shard/photos_00003/")
        assert shard.status == 200
        assert "Operations on this shard" not in shard.text
    finally:
        site.run(there.replace("{before}", "away_{table}").replace("{after}", "{table}"))
    assert site.get(f"{RUNS}1/change/").status == 200


def test_numbers_of_runs_are_as_commands_want_them(site: Site) -> None:
    site.run(
        "from django.conf import settings\n"
        "from sharded_orm.models import OperationRun\n"
        "settings.USE_THOUSAND_SEPARATOR = True\n"
        "OperationRun.objects.create(pk=4095, kind='migrate', subject='photos', state='done')"
    )
    try:
        assert "run 4095" in site.get(RUNS).text
        assert "4,095" not in site.get(f"{RUNS}4095/change/").text
    finally:
        site.run(
            "from django.conf import settings\n"
            "from sharded_orm.models import OperationRun\n"
            "settings.USE_THOUSAND_SEPARATOR = False\n"
            "OperationRun.objects.filter(pk=4095).delete()"
        )


def test_an_unclear_shard_has_the_command_that_settles_it(site: Site) -> None:
    pk = site.run(
        "from sharded_orm.models import OperationRun, OperationStep\n"
        "run = OperationRun.objects.create(kind='migrate', subject='unclear', state='failed')\n"
        "OperationStep.objects.create(run=run, alias='photos_00002', state='unclear', error='look')\n"
        "result = run.pk"
    )
    page = site.get(f"{RUNS}{pk}/change/")
    assert "manage.py migrate_shards --settle SHARD=done|undone" in page.text
    text = site.get("/admin/sharded_orm/shardmap/shard/photos_00002/").text
    assert f"migrate unclear, run {pk} unclear" in text


def test_a_run_whose_process_died_is_told(site: Site) -> None:
    pk = site.run(
        "from sharded_orm.models import OperationRun\n"
        "run = OperationRun.objects.create(kind='grow', subject='photos', unfinished=True,"
        " arguments={'count': 4, 'primary': 'two'})\n"
        "result = run.pk"
    )
    page = site.get(f"{RUNS}{pk}/change/")
    assert "State broken off" in page.text
    assert "manage.py shards grow photos --count 4 --primary two" in page.text
    site.run(
        f"from sharded_orm.models import OperationRun; OperationRun.objects.get(pk={pk}).delete()"
    )


def test_a_run_that_does_not_exist(site: Site) -> None:
    assert site.get(f"{RUNS}999999/change/").status == 404
    assert site.get(f"{RUNS}999999/progress/").status == 404


def test_many_runs_are_paged_with_three_queries(site: Site) -> None:
    site.run(
        "from sharded_orm.models import OperationRun\n"
        "OperationRun.objects.bulk_create(OperationRun(kind='other', subject=f's{n}', state='done')"
        " for n in range(120))"
    )
    page = site.get(RUNS)
    assert page.body.count('<th scope="row"><a') == 50
    # Queries for session, user, number of runs, runs, steps.
    assert len(page.queries["default"]) == 5
    assert "2 of 3" in site.get(f"{RUNS}?page=2").text


MOVE = """
from sharded_orm.models import KeyMove, OperationRun
KeyMove.objects.using("directory").create(
    group="watched", key="42", value="42", source=3, target=7, phase="copying", in_flight=True)
OperationRun.objects.create(kind="move keys", subject="watched", arguments={"keys": 9, "moved": 4},
    unfinished=True)
result = OperationRun.objects.latest("pk").pk
"""


def test_moves_of_keys_have_a_page_with_the_command_that_ends_them(site: Site) -> None:
    run = site.run(MOVE)
    page = site.get(f"{RUNS}{run}/change/")
    assert "State broken off" in page.text
    assert "keys 9 moved 4" in page.text
    assert "manage.py keys repair watched" in page.text


def test_moves_of_shards_tell_what_moves_and_what_is_left(site: Site) -> None:
    run = site.run(
        "from sharded_orm.models import OperationRun\n"
        "move = {'group': 'moving', 'number': 3, 'source': 'one', 'target': 'two', 'replica': None}\n"
        "arguments = {'current': {'move': move, 'number': 7, 'phase': 'hiding'},\n"
        "    'left': [{'shard': 2, 'node': 'one', 'number': 6, 'until': '2026-01-01', 'replica': None}]}\n"
        "result = OperationRun.objects.create(kind='move shards', subject='moving',"
        " arguments=arguments, unfinished=True).pk"
    )
    page = site.get(f"{RUNS}{run}/change/").text
    assert "current shard 3 from one to two: hiding left shard 2 on one" in page
    assert "All shards" not in page


@pytest.mark.parametrize(
    ("kind", "arguments", "command"),
    [
        ("move shards", {"to": "two", "shards": [3]}, "manage.py shards move watched --repair"),
        (
            "import follow",
            {"source": "default", "models": ["shop.Order"]},
            "manage.py shards import shop.Order --from default --follow",
        ),
    ],
)
def test_a_run_that_was_broken_off_names_the_command_that_goes_on(
    site: Site, kind: str, arguments: dict[str, object], command: str
) -> None:
    run = site.run(
        "from sharded_orm.models import OperationRun\n"
        f"result = OperationRun.objects.create(kind={kind!r}, subject='watched',"
        f" arguments={arguments!r}, unfinished=True).pk"
    )
    assert command in site.get(f"{RUNS}{run}/change/").text


def test_the_list_names_the_commands_that_move(site: Site) -> None:
    text = site.get(RUNS).text
    assert "manage.py keys move" in text
    assert "shards balance" in text
