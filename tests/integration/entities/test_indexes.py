"""Indexes are built and dropped while the site writes, and a shard that is down delays rows."""

from __future__ import annotations

from pathlib import Path

from tests.integration.entities.site import PREAMBLE, Site
from tests.patience import PATIENCE

#: Puts entities until it is stopped, and changes and deletes others.
_WRITES = """
import os, itertools
own = []
for n in itertools.count():
    if os.path.exists({stop!r}):
        break
    own.append(feed.put(entry(n % 5, f"l{{n % 3}}", n, rank=n % 4, slug=f"{name} {{n}}")).id)
    if n % 3 == 0:
        with feed.edit(random.choice(own)) as e:
            e["user_id"], e["rank"] = random.randrange(5), random.randrange(4)
    if n % 10 == 0:
        feed.delete(own.pop(random.randrange(len(own))))
    if n == 20:
        open({stop!r} + "{name}", "w").close()
"""


def test_an_index_is_built_and_dropped_while_the_site_writes(site: Site, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    site.manage("entities", "index", "drop", "feed.index_user", REMEMBERED="0.2")
    site.manage("entities", "index", "drop", "index_slug", REMEMBERED="0.2")
    out = site.run("""
for n in range(40):
    feed.put(entry(n % 5, "old", n, slug=f"old {n}"))
try:
    by_user.get_all(user_id=1)
except IndexNotServed as exc:
    print(by_user.model.objects.scatter().count(), by_slug.model.objects.scatter().count())
""")
    assert out == "0 0"
    writers = [
        site.start("run", PREAMBLE + _WRITES.format(stop=str(stop), name=name), REMEMBERED="0.2")
        for name in "ab"
    ]
    try:
        for name in "ab":
            site.wait_for(Path(f"{stop}{name}"), writers)
        build = ["entities", "index", "build", "--share", "1"]
        site.manage(*build, "feed.index_user", "index_slug", REMEMBERED="0.2")
        site.manage("entities", "index", "drop", "feed.index_user", REMEMBERED="0.2")
        site.manage(*build, "feed.index_user", REMEMBERED="0.2")
    finally:
        stop.touch()
    for writer in writers:
        _, err = writer.communicate(timeout=PATIENCE)
        assert writer.returncode == 0, err
    site.manage("entities", "clean", "--once")
    assert site.run("print(differences(), len(every(by_user, user_id=1)) > 8)") == "[] True"


def test_a_unique_index_is_not_served_while_two_entities_have_a_value(site: Site) -> None:
    site.manage("entities", "index", "drop", "index_slug", REMEMBERED="0.2")
    ids = site.run("""
e, f = feed.put(entry(1, slug="same")), feed.put(entry(2, slug="same"))
print(e.id, f.id)
""").split()
    done = site.manage("entities", "index", "build", "index_slug", code=1, REMEMBERED="0.2")
    assert "same" in done.err and any(id in done.err for id in ids)
    site.run(f"feed.delete(uuid.UUID({ids[0]!r}))")
    site.manage("entities", "index", "build", "index_slug", REMEMBERED="0.2")
    assert site.run("print(len(by_slug.get_all(slug='same')))") == "1"


def test_an_index_is_not_served_if_its_rows_may_be_missing(site: Site) -> None:
    out = site.run("""
from django.db import migrations
from sharded_orm.contrib.entities import index_states
from sharded_orm.contrib.entities.models import IndexState
with transaction.atomic():
    # What the caller's transaction sees may be older, and must not be remembered.
    IndexState.objects.filter(index=by_rank.label).update(state="dropped")
    print(index_states.read_state(by_rank))
by_link.group = "books"
recreated = migrations.Migration("0002", "feeds")
recreated.operations = [migrations.CreateModel("IndexUser", [])]
for using in ("default", "accounts_00000"):
    index_states.before_migrate(using=using, plan=[(recreated, False)])
    print(index_states.read_state(by_user))
for index, properties in ((by_link, {"link": "a"}), (by_user, {"user_id": 1})):
    try:
        index.get_all(**properties)
    except IndexNotServed as exc:
        print(str(exc).partition(",")[0])
""")
    assert out.splitlines() == [
        "served",
        "served",
        "written",
        "Index 'feed.index_link' is written but not built",
        "Index 'feed.index_user' is written but not built",
    ]


def test_commands_name_the_indexes_that_there_are(site: Site) -> None:
    for action in ("build", "drop"):
        done = site.manage("entities", "index", action, "nothing", code=1)
        assert "'nothing'" in done.err and "'feed.index_user'" in done.err
    done = site.manage("entities", "index", "drop", "feed", code=1)
    assert "'feed.index_link'" in done.err and "Name one" in done.err
    out = site.run("""
for properties in ({"user_id": None}, {"link": "a"}):
    try:
        by_user.get_all(**properties)
    except (InvalidProperty, InvalidIndexQuery) as exc:
        print(type(exc).__name__, "feed.index_user" in str(exc))
""")
    assert out.splitlines() == ["InvalidProperty True", "InvalidIndexQuery True"]


def test_commands_do_all_they_are_told_or_nothing(site: Site) -> None:
    index = ["entities", "index"]
    site.manage(*index, "build", "feed.index_user", "nothing", code=1)
    done = site.manage(*index, "drop", "posts", code=1)  # The store has a single index.
    assert "'posts.index_topic'" in done.err and "Name one" in done.err
    done = site.manage(*index, "build", "posts", "index_topic", "posts.index_topic")
    assert done.out.count("is served") == 1
    out = site.run("""
from sharded_orm.contrib.entities import index_build
DataStore("bare", group="accounts", fields={}, module=feed.module)
for find in (index_build.find_index, lambda name: index_build.find_indexes([name])):
    try:
        find("bare")
    except Exception as exc:
        print(str(exc).split(".")[0])
from sharded_orm.contrib.entities.models import IndexState
print(*IndexState.objects.order_by("index").values_list("state", flat=True))
""")
    assert out.splitlines() == [*["Store 'bare' has no index"] * 2, " ".join(["served"] * 5)]
    for option in ("--interval", "--whole-every"):
        for seconds in ("-1", "nan", "inf", "soon"):
            done = site.manage("entities", "clean", option, seconds, code=2)
            assert repr(seconds) in done.err


def test_an_index_is_not_built_and_dropped_at_the_same_time(site: Site) -> None:
    """A build would let reads rely on an index whose rows are being removed."""
    out = site.run("""
from sharded_orm.contrib.entities import index_build, index_states
from sharded_orm.exceptions import OperationHeld
for n in range(9):
    feed.put(entry(1, at=n))
build = lambda: [*index_build.build(by_user, share=1, pause=lambda seconds: None)]
drop = lambda: [*index_build.drop(by_user, pause=lambda seconds: None)]
for begun in (index_build.drop(by_user), index_build.build(by_user)):
    next(begun)
    for work in (build, drop):
        try:
            work()
        except OperationHeld as exc:
            # The error has no note about the global database, which has done its part.
            print("feed.index_user" in str(exc), not hasattr(exc, "__notes__"), index_states.read_state(by_user))
    begun.close()
build()
print(len(by_user.get_all(user_id=1)), differences())
""")
    assert out.splitlines() == [
        *["True True dropped"] * 2,
        *["True True written"] * 2,
        "9 []",
    ]


def test_a_wait_that_was_interrupted_is_not_left_out(site: Site) -> None:
    """A process may still believe in the state before, and leave out rows, or write them."""
    out = site.run("""
from sharded_orm.contrib.entities import index_build, index_states
from sharded_orm.contrib.entities.models import IndexState
index_build.LEARNED_AFTER = 3600
for n in range(9):
    feed.put(entry(1, at=n))
def run(work):
    pauses = []
    *_, last = work(by_user, pause=pauses.append, stopping=lambda: bool(pauses))
    # Other pauses last parts of a second.
    return sum(seconds > 1800 for seconds in pauses), by_user.model.objects.scatter().count()
for work in (index_build.drop, index_build.build):
    print(*run(work), *run(work))
    IndexState.objects.update(since=moment(0))
    print(run(work)[0], "later")
""")
    assert out.splitlines() == ["1 9 1 9", "0 later"] * 2


def test_a_put_succeeds_while_the_shard_of_an_index_is_down(site: Site) -> None:
    """The shard's tables are away, as if its server were."""
    out = site.run("""
def rename(old, new):
    with connections["accounts_00001"].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")
from sharded_orm.contrib.entities import cleaner
rename("feeds_index_user", "away")
e = feed.put(entry(1, "l", slug="s", title="t", rank=1))
print(titles(by_link.get_all(link="l")), titles(by_slug.get_all(slug="s")))
try:
    by_user.get_all(user_id=1)
except Exception as exc:
    print("no page")
report = cleaner.CleanReport()
cleaner.clean_marked(report, min_age=0)
print(report.settled, report.failed, marks())
rename("away", "feeds_index_user")
cleaner.clean_marked(report, min_age=0)
print(titles(by_user.get_all(user_id=1)), differences(), marks())
""")
    assert out.splitlines() == ["['t'] ['t']", "no page", "0 1 1", "['t'] [] 0"]


def test_a_state_is_stored_while_another_connection_writes(site: Site) -> None:
    """On SQLite, a transaction that has read fails at once if it writes meanwhile."""
    out = site.run("""
import threading
from sharded_orm.contrib.entities import index_states
from sharded_orm.contrib.entities.models import IndexState
other = connections.create_connection("default")
other.inc_thread_sharing()
other.set_autocommit(False)
table, column = map(other.ops.quote_name, (IndexState._meta.db_table, "state"))
other.cursor().execute(f"UPDATE {table} SET {column} = 'served'")
def commit_later(execute, sql, *arguments):
    if sql.startswith("UPDATE") and not waits:
        waits.append(threading.Timer(0.3, other.commit))
        waits[0].start()
    return execute(sql, *arguments)
waits = []
with connections["default"].execute_wrapper(commit_later):
    index_states.set_state(by_user, "written")
waits[0].join()
print(index_states.read_state(by_user))
""")
    assert out == "written"


def test_a_build_leaves_the_site_its_share_of_the_time(site: Site) -> None:
    out = site.run("""
import time
from sharded_orm.contrib.entities import index_build, index_states
from sharded_orm.contrib.entities.models import IndexState
for n in range(50):
    feed.put(entry(n))
index_states.set_state(by_user, "written")
IndexState.objects.update(since=moment(0))
pauses, began = [], time.monotonic()
*_, report = index_build.build(by_user, share=0.1, pause=pauses.append)
worked = time.monotonic() - began
print(report.is_served, 0.5 * worked < sum(pauses) / 9 <= worked)
""")
    assert out == "True True"
    for share in ("0", "1.5", "nan", "much"):
        done = site.manage("entities", "index", "build", "feed", "--share", share, code=2)
        assert repr(share) in done.err


def test_a_pass_that_is_slower_than_the_writers_comes_to_an_end(site: Site) -> None:
    out = site.run("""
from itertools import islice
from sharded_orm.contrib.entities import stored_entity
from sharded_orm.contrib.entities.clean_report import CleanReport
stored_entity.BATCH = 1
ids = (id for id in map(lambda n: uuid.UUID(int=n), range(999)) if runtime.locate("accounts", id).number == 0)
def put():
    feed.put(Entity(id=next(ids)))
put()
rows, passed = stored_entity.rows_of(feed, "accounts_00000"), 0
for entities in islice(stored_entity.entity_batches(feed, rows, CleanReport()), 50):
    passed += len(entities)
    put()
print(passed)
""")
    assert out == "1"
