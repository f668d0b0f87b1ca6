"""The cleaner mends what writers leave: killed ones, late ones, and SQL."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.integration.entities.site import Site

_IN = "sharded_orm.contrib.entities"
#: The process dies at the end of that call.
WRITER_DIES = [
    f"{_IN}.store.DataStore._update:1",
    f"{_IN}.index_rows.follow:1",
    f"{_IN}.store.DataStore._insert:2",
    f"{_IN}.index_rows.insert:4",
    f"{_IN}.index_rows.raise_version:1",
    f"{_IN}.reservations.reserve:1",
    f"{_IN}.reservations.reserve:2",
    f"{_IN}.reservations._confirm:1",
    f"{_IN}.reservations._confirm:2",
    f"{_IN}.index_rows.follow:3",
]
_PROGRAM = """
e = feed.put(entry(1, "a", 1, title="first", slug="s"))
e["user_id"], e["published"], e["title"], e["slug"] = 2, moment(2), "second", "t"
feed.put(e)
feed.put(entry(3, "b", 3, title="third", rank=1, slug="u"))
feed.delete(e.id)
"""
CLEANER_DIES = [
    "sharded_orm.operations.runs.journal.take_lease:1",
    f"{_IN}.cleaner.compare:1",
    f"{_IN}.index_rows.insert_missing:1",
    f"{_IN}.index_rows.remove_rows:1",
    f"{_IN}.cleaner.clean_batch:1",
    f"{_IN}.cleaner.take_off_marks:1",
    f"{_IN}.whole_pass.remove_stale:1",
]


def _first_two(moments: list[str]) -> list[Any]:
    """The others are for long runs."""
    return [*moments[:2], *(pytest.param(moment, marks=pytest.mark.long) for moment in moments[2:])]


@pytest.mark.parametrize("moment", _first_two(WRITER_DIES))
def test_the_cleaner_mends_what_a_killed_writer_leaves(site: Site, moment: str) -> None:
    done = site.kill_at(moment, _PROGRAM)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    site.manage("entities", "clean", "--once")
    assert site.run("print(differences())") == "[]"


@pytest.mark.parametrize("moment", _first_two(CLEANER_DIES))
def test_a_cleaner_goes_on_after_a_killed_one(site: Site, moment: str) -> None:
    site.run(UNFOLLOWED + _PROGRAM)
    assert site.run("print(differences() == [])") == "False"
    done = site.python("manage.py", "entities", "clean", "--once", KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    site.manage("entities", "clean", "--once")
    assert site.run("print(differences(), marks())") == "[] 0"


#: Nobody writes index rows after the commit, as if each writer died there.
UNFOLLOWED = """
from sharded_orm.contrib.entities import index_rows
index_rows.follow = lambda *ignored: None
"""


def test_the_whole_pass_finds_what_no_mark_tells(site: Site) -> None:
    site.run("""
e, f = feed.put(entry(1, slug="s", title="e")), feed.put(entry(2, title="f"))
from sharded_orm.contrib.entities import cleaner
cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
by_user.model.objects.filter(user_id=1).delete()
row = by_user.model.objects.get(user_id=2)
by_user.model(user_id=3, entity_id=row.entity_id, version=1).save(force_insert=True)
by_user.model(user_id=4, entity_id=uuid.uuid4(), version=9).save(force_insert=True)
by_slug.model(slug="t", entity_id=e.id, version=1).save(force_insert=True)
print(by_user.get_all(user_id=3).entities, by_user.get_all(user_id=4).entities)
""")
    done = site.manage("entities", "clean", "--once", "--json").json
    assert (done["written"], done["removed"], done["problems"]) == (1, 3, [])
    assert site.run("print(differences())") == "[]"
    status = json.loads(site.manage("entities", "status", "--json").out)
    assert [(s["name"], s["backlog"]) for s in status["stores"]] == [("feed", 0), ("posts", 0)]
    assert {i["stale"] for i in status["indexes"]} == {0}


def test_the_status_tells_backlog_lag_and_stale_rows(site: Site) -> None:
    site.run(
        UNFOLLOWED
        + """
from django.utils import timezone
entities = [feed.put(Entity(user_id=n)) for n in range(3)]
hour_ago = timezone.now() - datetime.timedelta(hours=1)
feed.model.objects.filter(id=entities[0].id).update(marked_at=hour_ago)
for e, user in zip(entities, (0, 1, 9)):
    by_user.model(user_id=user, entity_id=e.id, version=1).save(force_insert=True)
"""
    )
    status = json.loads(site.manage("entities", "status", "--json").out)
    (store, _), (index, *_) = status["stores"], status["indexes"]
    assert (store["name"], store["backlog"], 3600 <= store["lag"] < 7200) == ("feed", 3, True)
    assert (index["state"], index["sampled"], index["stale"]) == ("served", 3, 1)
    site.run("""
with connections["accounts_00001"].cursor() as cursor:
    cursor.execute(f"ALTER TABLE {feed.model._meta.db_table} RENAME TO away")
""")
    done = site.manage("entities", "status", code=1)
    assert "feed.index_user" in done.out and "accounts_00001" in done.err
    assert "'-1'" in site.manage("entities", "status", "--sample=-1", code=2).err


def test_the_newest_changes_are_cleaned_first(site: Site) -> None:
    """Also if there are so many that a shard has a lease."""
    out = site.run(
        UNFOLLOWED
        + """
from sharded_orm.contrib.entities import cleaner
cleaner.BATCH = 2
ids = [id for id in map(lambda n: uuid.UUID(int=n), range(99)) if runtime.locate("accounts", id).number == 0]
for n in range(6):
    feed.put(Entity(user_id=1, title=n, id=ids[n]))
    feed.model.objects.filter(id=ids[n]).update(marked_at=moment(n))
stopping = by_user.model.objects.scatter().exists
for _ in range(2):
    cleaner.clean_marked(cleaner.CleanReport(), min_age=0, stopping=stopping)
    print(sorted(titles(by_user.get_all(user_id=1))))
    stopping = lambda: False
"""
    )
    assert out.splitlines() == ["[4, 5]", "[0, 1, 2, 3, 4, 5]"]


def test_a_damaged_body_keeps_no_other_entity_from_its_index(site: Site) -> None:
    id = site.run(
        UNFOLLOWED
        + """
e, f = feed.put(entry(1, "a", title="e")), feed.put(entry(1, "a", title="f"))
feed.model.objects.filter(id=e.id).update(body=b"x")
print(e.id)
"""
    )
    assert id in site.manage("entities", "clean", "--once", code=1).err
    assert site.run("print(titles(by_user.get_all(user_id=1)), marks())") == "['f'] 1"
    done = site.manage("entities", "index", "build", "index_user", "--share", "1")
    assert id in done.err and "is served" in done.out


def test_marked_entities_of_all_shards_are_repaired_together(site: Site) -> None:
    """A shard of theirs that is down keeps the others from nothing."""
    out = site.run(
        UNFOLLOWED
        + """
from sharded_orm.contrib.entities import cleaner
def clean():
    report = cleaner.CleanReport()
    cleaner.clean_marked(report, min_age=0)
    print(report.settled, len(inserts), len(report.problems))
def rename(old, new):
    with connections["accounts_00001"].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")
inserts, insert_missing = [], index_rows.insert_missing
def counted(*arguments):
    inserts.append(1)
    insert_missing(*arguments)
index_rows.insert_missing = counted
for shard in range(4):
    for id in [id for id in map(lambda n: uuid.UUID(int=n), range(99)) if runtime.locate("accounts", id).number == shard][:3]:
        feed.put(Entity(user_id=1, id=id))
table = feed.model._meta.db_table
rename(table, "away")
clean()
rename("away", table)
clean()
print(differences(), marks())
"""
    )
    assert out.splitlines() == ["9 1 1", "3 2 0", "[] 0"]


def test_the_whole_pass_goes_on_soon_after_an_outage(site: Site) -> None:
    """Of the global database, or of a shard of an index. What was compared before is not compared again."""
    out = site.run("""
from sharded_orm.contrib.entities import cleaner, index_rows
from sharded_orm.models import OperationRun
def rename(alias, old, new):
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")
def round():
    report = clean.round()
    return report.compared, bool(report.problems)
e = feed.put(Entity(title="lacks its rows", user_id=1, link="a"))
for alias, table in (
    ("default", OperationRun._meta.db_table),
    (index_rows.alias_of(by_user, 1), by_user.model._meta.db_table),
):
    by_user.model.objects.scatter().delete()
    feed.model.objects.filter(id=e.id).update(marked_at=None)
    clean = cleaner.ContinuousCleaner(60, 3600, lambda: False, retry_after=0)
    rename(alias, table, "away")
    print(round())
    rename(alias, "away", table)
    print(round(), round())
    cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
    print(differences())
""")
    assert out.splitlines() == [
        *("(0, True)", "(1, False) (0, False)", "[]"),
        *("(1, True)", "(1, False) (0, False)", "[]"),
    ]


_ONCE = (
    "0 marked entities cleaned, 0 failed; 0 index rows written, 0 removed; 8 compared;"
    " 1 times a shard was left to another cleaner."
)


def test_a_shard_on_which_another_cleaner_works_is_left_to_it(site: Site) -> None:
    """And more marked entities than a batch has are repaired in several."""
    out = site.run(
        UNFOLLOWED
        + """
from sharded_orm.contrib.entities import cleaner
cleaner.BATCH = 2
def clean():
    report = cleaner.CleanReport()
    cleaner.clean_marked(report, min_age=0)
    print(report.settled, report.skipped, report.problems, sorted(titles(by_user.get_all(user_id=1))))
for shard, count in enumerate((2, 1, 1, 1)):
    ids = [id for id in map(lambda n: uuid.UUID(int=n), range(99)) if runtime.locate("accounts", id).number == shard]
    for id in ids[:count]:
        feed.put(Entity(user_id=1, title=shard, id=id))
with cleaner.leased(cleaner.LEASE, "feed accounts_00000"):
    clean()
clean()
from django.core.management import call_command
with cleaner.leased(cleaner.LEASE, "feed accounts_00000 all"):
    call_command("entities", "clean", "--once")
print(differences(), marks())
"""
    )
    assert out.splitlines() == ["3 1 [] [1, 2, 3]", "2 0 [] [0, 0, 1, 2, 3]", _ONCE, "[] 0"]


def test_keys_that_cannot_be_placed_keep_no_other_index_from_its_rows(site: Site) -> None:
    out = site.run(
        UNFOLLOWED
        + """
from sharded_orm.contrib.entities import cleaner
from sharded_orm.models.tables.directory import Placement
def rename(old, new):
    with connections["directory"].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")
def clean():
    report = cleaner.CleanReport()
    cleaner.clean_marked(report, min_age=0)
    print(report.settled, report.failed, len(report.problems), titles(by_user.get_all(user_id=2)))
for n in (1, 2):
    feed.put(entry(n, title=n, rank=n, slug=f"s{n}"))
feed.put(entry(3, title=3))
table = Placement._meta.db_table
rename(table, "away")
clean()
rename("away", table)
clean()
print(differences(), marks())
"""
    )
    assert out.splitlines() == ["1 2 2 [2]", "2 0 0 [2]", "[] 0"]


def test_a_shard_that_stays_down_keeps_the_whole_pass_from_no_other(site: Site) -> None:
    out = site.run("""
from sharded_orm.contrib.entities import cleaner, index_rows
e = feed.put(Entity(user_id=1))
alias, table = index_rows.alias_of(by_topic, "t"), by_topic.model._meta.db_table
with connections[alias].cursor() as cursor:
    cursor.execute(f"ALTER TABLE {table} RENAME TO away")
clean = cleaner.ContinuousCleaner(60, 0, lambda: False, retry_after=0)
first = clean.round()
by_user.model.objects.scatter().delete()
feed.model.objects.filter(id=e.id).update(marked_at=None)
second = clean.round()
print(first.problems == second.problems != [], second.compared, marks())
""")
    assert out == "True 1 1"


def test_a_value_that_no_database_takes_does_not_stop_the_cleaner(site: Site) -> None:
    """Puts refuse it, but the program that wrote it may have been another one."""
    out = site.run(
        UNFOLLOWED
        + """
from sharded_orm.contrib.entities import cleaner
from sharded_orm.contrib.entities.properties import encode
e, f = feed.put(entry(1, "a", title="e")), feed.put(entry(1, "a", title="f"))
body = encode({}, {"user_id": 2**80, "title": "e"})
feed.model.objects.filter(id=e.id).update(body=body)
report = cleaner.CleanReport()
cleaner.clean_marked(report, min_age=0)
print(report.settled, str(e.id) in report.damaged[0], titles(by_user.get_all(user_id=1)))
"""
    )
    assert out == "1 True ['f']"


#: As published: the cleaner looks only at what is newer than anything that it has seen.
_TRUSTS_UPDATED = """
from sharded_orm.contrib.entities import cleaner
newest, marked = [], cleaner._marked
def newer(rows, min_age):
    rows = marked(rows, min_age)
    return rows.filter(updated__gt=max(newest)) if newest else rows
cleaner._marked = newer
"""


@pytest.mark.parametrize(("ablation", "found"), [("", "['late']"), (_TRUSTS_UPDATED, "[]")])
def test_an_update_that_commits_late_with_an_older_time_is_not_lost(
    site: Site, ablation: str, found: str
) -> None:
    """Unless the cleaner trusts the times of updates."""
    out = site.run(
        UNFOLLOWED
        + ablation
        + """
from threading import Thread
from sharded_orm.contrib.entities import cleaner
report = cleaner.CleanReport()
def clean():
    cleaner.clean_marked(report, min_age=0)
    connections.close_all()
def id_on(shard):
    # SQLite locks whole shards, so each entity and each index row is on one of its own.
    return next(id for id in map(lambda n: uuid.UUID(int=n), range(99)) if runtime.locate("accounts", id).number == shard)
e = feed.put(Entity(user_id=1, title="late", id=id_on(0)))
clean()
# The time of the change is that of its statement, and its commit comes after newer changes are cleaned.
with sharded_orm.atomic(feed.model, id=e.id):
    e["user_id"] = 2
    feed.put(e)
    other = feed.put(Entity(user_id=5, id=id_on(3)))
    thread = Thread(target=clean)
    thread.start()
    thread.join()
if "newest" in globals():
    newest.append(other.updated)
clean()
print(len(by_user.get_all(user_id=5)), titles(by_user.get_all(user_id=2)))
"""
    )
    assert out == f"1 {found}"


#: Changes the entity that was put, and cleans it, when the process is about to write its index row.
_LATE = """
from sharded_orm.contrib.entities import cleaner, index_rows
index_rows.FOLLOW_TIME = 0
def clean():
    cleaner.clean_marked(cleaner.CleanReport(), min_age=0)
def late(module, name):
    in_time = getattr(module, name)
    def write_late(*arguments):
        setattr(module, name, in_time)
        ((id,),) = feed.model.objects.scatter().values_list("id")
        with feed.edit(id) as e:
            e["user_id"] = 2
        clean()
        in_time(*arguments)
    setattr(module, name, write_late)
"""


@pytest.mark.parametrize(
    "program",
    [
        'late(index_rows, "insert")\nfeed.put(Entity(user_id=1))',
        UNFOLLOWED + 'feed.put(Entity(user_id=1))\nlate(cleaner, "settle")\nclean()',
    ],
    ids=["writer", "cleaner"],
)
def test_an_index_row_that_was_written_late_is_removed_soon(site: Site, program: str) -> None:
    """The entity has another version by then, whose mark was removed."""
    out = site.run(
        f"{_LATE}{program}"
        """
stale = len(differences())
clean()
print(stale, differences(), marks())
"""
    )
    assert out == "1 [] 0"
