"""Keys and shards move, while entities are put, cleaned and read.

Every acknowledged put is there once, and found by its indexes. Pages are right all the time.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.entities.site import PREAMBLE
from tests.integration.entities.site import Site as EntitySite
from tests.integration.imports.site import site_fixture
from tests.integration.shard_moves.site import Site as SiteOfMoves
from tests.patience import PATIENCE
from tests.python_process import PythonProcess


class Site(SiteOfMoves, EntitySite):
    """A site with entities, whose shards can move, too."""

    def initialize(self) -> None:
        self.prepare()


site = site_fixture(Site)


#: Entities that nobody changes: every list has them, whatever moves.
_ANCHORS = """
for n in range(24):
    feed.put(entry(n % 4 + 1, "l", n, rank=n % 5, slug=f"anchor {n}", title="anchor"))
    posts.put(Entity(user_id=n % 4 + 1, topic=f"t{n % 2}", title="anchor"))
"""
#: Puts, changes and deletes entities. Half of the processes leave the index rows to the cleaner.
_TELLER = """
import json, os
from django.db import OperationalError
from django.db.backends.signals import connection_created
from sharded_orm.contrib.entities import index_rows
from sharded_orm.exceptions import KeyMoved, ShardMoved
if {silent}:
    index_rows.follow = lambda *ignored: None
# On SQLite, two edits that reserve values in each other's file wait for each other until one gives up.
def wait_less(connection, **kwargs):
    if connection.vendor == "sqlite":
        connection.cursor().execute("PRAGMA busy_timeout = 2000")
connection_created.connect(wait_less)
random.seed({seed})
moved, puts, own = 0, 0, {{}}
def store_of(id):
    return (posts, {{"user_id": own[id]["user_id"]}}) if "topic" in own[id] else (feed, {{}})
while not os.path.exists({stop!r}):
    what, user, n = random.random(), random.randrange(1, 5), puts + moved
    try:
        if what < 0.25 or not own:
            e = feed.put(entry(user, "l", n % 30, rank=n % 5, slug=f"{seed} {{n}}", title="x"))
        elif what < 0.5:
            e = posts.put(Entity(user_id=user, topic=f"t{{n % 2}}", title="x"))
        else:
            id = random.choice(list(own))
            store, key = store_of(id)
            if what < 0.6:
                store.delete(id, **key)
                del own[id]
                puts += 1
                continue
            if what < 0.8:
                e = store.get(id, **key)
                e |= {{"topic": f"t{{n % 2}}"}} if store is posts else {{"user_id": user, "rank": n % 5}}
                store.put(e)
            else:
                with store.edit(id, **key) as e:
                    e |= {{"topic": f"t{{n % 2}}"}} if store is posts else {{"slug": f"{seed} {{n}}"}}
        own[e.id] = dict(e)
        puts += 1
    except (KeyMoved, ShardMoved):  # Nothing was written.
        moved += 1
    except OperationalError as exc:
        if "database is locked" not in str(exc):
            raise
        moved += 1  # Nothing was written here either.
stored = {{id: store.get(id, **key) for id in own for store, key in [store_of(id)]}}
print(json.dumps([puts, moved, [str(id) for id in own if dict(stored[id]) != own[id]], len(own)]))
"""
_READER = """
import json, os
random.seed(1)
counts = dict(reads=0, wrong=0, short=0, doubled=0)
while not os.path.exists({stop!r}):
    index, name, value, anchors = random.choice([
        (by_rank, "user_id", random.randrange(1, 5), 6),
        (by_topic, "topic", f"t{{random.randrange(2)}}", 12),
        (by_link, "link", "l", 24),
    ])
    after, found = None, []
    while True:
        limit = random.choice([2, 10])
        page = index.get_all(limit=limit, after=after, **{{name: value}})
        counts["reads"] += 1
        counts["wrong"] += sum(e[name] != value for e in page)
        counts["short"] += len(page) < limit and page.after is not None
        counts["doubled"] += len(page) - len({{e.id for e in page}})
        found += page
        after = page.after
        if after is None:
            break
    counts["short"] += sum(e["title"] == "anchor" for e in found) != anchors
print(json.dumps(counts))
"""
_KEYS = [("2", "0"), ("1", "3"), ("2", "3"), ("1", "0"), ("3", "1"), ("2", "1")]
_SHARDS = [("accounts", "0", "db2"), ("books", "3", "db1"), ("accounts", "0", "db1")]


def _bank(site: Site, folder: Path, *, tellers: int, moves: list[tuple[str, ...]]) -> Any:
    stop = str(folder / "stop")
    site.run(_ANCHORS)
    with ExitStack() as ending:

        def start(*arguments: str) -> PythonProcess:
            process = site.start(*arguments)
            ending.callback(process.kill)
            return process

        telling = [
            start("run", PREAMBLE + _TELLER.format(seed=n, silent=n % 2, stop=stop))
            for n in range(tellers)
        ]
        reader = start("run", PREAMBLE + _READER.format(stop=stop))
        clean = ["manage.py", "entities", "clean", "--interval", "0.2", "--whole-every", "0"]
        cleaner = start(*clean, "-v", "0")
        for move in moves:
            if len(move) == 2:
                site.manage("keys", "move", "books", move[0], "--to", move[1], "--keep", "0")
            else:
                _move_shard(site, *move)
        Path(stop).touch()
        cleaner.terminate()
        results = []
        for process in (*telling, reader, cleaner):
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            results.append(out)
    site.manage("entities", "clean", "--once")
    assert site.run("print(differences(), marks())") == "[] 0"
    *told, read, _ = results
    return [json.loads(out) for out in told], json.loads(read)


def _move_shard(site: Site, group: str, number: str, node: str) -> None:
    """Move a shard. If the tellers keep its file of SQLite locked, the move is refused, and tried again."""
    until = time.monotonic() + PATIENCE
    while True:
        done = site.python("manage.py", "shards", "move", group, number, "--to", node)
        if "wait until nobody else writes" not in done.err or time.monotonic() > until:
            assert done.code == 0, done.err
            return


def _check(told: list[Any], read: dict[str, int]) -> None:
    assert [damaged for _, _, damaged, _ in told] == [[]] * len(told)
    assert all(puts > 5 for puts, *_ in told) and read["reads"] > 5
    assert read["wrong"] == read["short"] == read["doubled"] == 0, read


def test_entities_are_right_while_a_key_and_a_shard_move(site: Site, tmp_path: Path) -> None:
    _check(*_bank(site, tmp_path, tellers=2, moves=[_KEYS[0], _SHARDS[0]]))


@pytest.mark.long
def test_a_bank_with_entities(site: Site, tmp_path: Path) -> None:
    # Shards first: on SQLite, a key that has moved leaves a fence, with which its shard cannot move.
    _check(*_bank(site, tmp_path, tellers=4, moves=[*_SHARDS, *_KEYS, *_KEYS[::-1]]))


def test_an_index_is_built_with_the_entities_of_keys_that_move_meanwhile(site: Site) -> None:
    """The entity is on no shard when that is compared."""
    out = site.run("""
from sharded_orm.contrib.entities import index_build, index_states
posts.put(Entity(user_id=1, topic="t"))
if runtime.locate("books", 1).number != 3:
    sharded_orm.move_key("books", 1, to=3)
by_topic.model.objects.scatter().delete()
posts.model.objects.filter(user_id=1).update(marked_at=None)
index_states.set_state(by_topic, "written")
index_build.LEARNED_AFTER = 0
index_build._write = lambda *ignored: iter(())
looks, mark_lacking = [], index_build.mark_lacking
def move_before_the_second_look(*arguments):
    looks.append(1)
    if len(looks) == 2:
        sharded_orm.move_key("books", 1, to=0)
    return mark_lacking(*arguments)
index_build.mark_lacking = move_before_the_second_look
*_, report = index_build.build(by_topic)
print(report.is_served, differences(), len(every(by_topic, topic="t")))
""")
    assert out == "True [] 1"


def test_an_index_is_not_served_if_moved_keys_are_known_by_digests_alone(site: Site) -> None:
    out = site.run("""
import re
from sharded_orm.contrib.entities import index_build
from sharded_orm.routing import directory
# As if the key was a text with capital letters.
directory._PLAIN, directory._LONGEST_PLAIN = re.compile("(?!)"), 0
posts.put(Entity(user_id=1, topic="t"))
posts.model.objects.filter(user_id=1).update(marked_at=None)
target, verify = 0 if runtime.locate("books", 1).number else 3, index_build._verify
def move_meanwhile(*arguments):
    for found in verify(*arguments):
        if runtime.locate("books", 1).number != target:
            sharded_orm.move_key("books", 1, to=target)
        yield found
index_build._verify = move_meanwhile
*_, report = index_build.build(by_topic)
print(report.is_served, report.problems)
""")
    assert out.startswith("False ") and "while no key moves" in out


def test_a_put_raises_no_error_after_it_has_written(site: Site) -> None:
    """The directory goes down just then."""
    out = site.run("""
from sharded_orm.contrib.entities import store
insert = store.DataStore._insert
def insert_and_lose_the_directory(*arguments, **more):
    insert(*arguments, **more)
    runtime.placement_lease()._poll = None
    with connections[runtime.strategy("books").store._alias].cursor() as cursor:
        cursor.execute("ALTER TABLE sharded_orm_key_move RENAME TO away")
store.DataStore._insert = insert_and_lose_the_directory
print(posts.put(Entity(user_id=1, topic="t")).version)
""")
    assert out == "1"


def test_keys_move_with_their_entities(site: Site) -> None:
    site.run("""
for n in range(10):
    posts.put(Entity(user_id=n % 2 + 1, topic="t", title=n))
    feed.put(entry(n % 2 + 1, "l", n, rank=n, slug=str(n)))
""")
    here = site.run("print(runtime.locate('books', 1).number)")
    target = "3" if here != "3" else "0"
    site.manage("keys", "move", "books", "1", "--to", target)
    out = site.run("""
print(runtime.locate("books", 1).number, len(every(by_topic, topic="t")), len(every(by_rank, user_id=1)), differences())
""")
    assert out == f"{target} 10 5 []"
