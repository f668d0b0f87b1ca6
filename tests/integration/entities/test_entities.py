"""Entities are stored, found and changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.entities.outages import mortal_site
from tests.integration.entities.site import Site


def test_an_entity_is_stored_and_found_by_its_indexes(site_everywhere: Site) -> None:
    site = site_everywhere
    out = site.run("""
e = feed.put(entry(7, "https://example.org/", 5, title="Ünï", tags=["a", {"b": None}], slug="s"))
again = feed.get(e.id)
print(again == feed.get(str(e.id)) == e, again.version, dict(again) == dict(e), again.added_id == e.added_id)
print(titles(by_user.get_all(user_id=7)), titles(by_link.get_all(link="https://example.org/")))
print(titles(by_slug.get_all(slug="s")), by_user.get_all(user_id=8).entities)
again["user_id"] = 8
feed.put(again)
print(by_user.get_all(user_id=7).entities, titles(by_user.get_all(user_id=8)))
with feed.edit(e.id) as changed:
    changed["title"] = "edited"
print(titles(by_link.get_all(link="https://example.org/", published=moment(5))))
p = posts.put(Entity(user_id=3, topic="t", title="x"))
print(posts.get(p.id, user_id=3) == p, titles(by_topic.get_all(topic="t")), posts.get_many([p.id], user_id=4))
""")
    assert out.splitlines() == [
        "True 1 True True",
        "['Ünï'] ['Ünï']",
        "['Ünï'] []",
        "[] ['Ünï']",
        "['edited']",
        "True ['x'] {}",
    ]


def test_two_changes_of_one_version_are_one_winner(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
e = feed.put(entry(1, n=0))
one, two = feed.get(e.id), feed.get(e.id)
one["n"], two["n"] = 1, 2
feed.put(one)
try:
    feed.put(two)
except EntityChanged:
    print(feed.get(e.id)["n"], feed.get(e.id).version, two.version)
feed.delete(e.id)
for attempt in (lambda: feed.put(one), lambda: feed.get(e.id), lambda: feed.delete(e.id), lambda: feed.edit(e.id).__enter__()):
    try:
        attempt()
    except (EntityChanged, EntityNotFound) as exc:
        print(type(exc).__name__)
f = feed.put(entry(1))
try:
    feed.put(Entity(id=f.id))
except EntityExists:
    print("exists", feed.get(f.id).version)
print(feed.get_many([e.id, f.id, uuid.uuid4()]).keys() == {f.id})
""")
    assert out.splitlines() == [
        "1 2 1",
        "EntityChanged",
        "EntityNotFound",
        "EntityNotFound",
        "EntityNotFound",
        "exists 1",
        "True",
    ]


def test_index_rows_follow_the_commit_of_a_transaction(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
e = feed.put(entry(1, title="e"))
try:
    with transaction.atomic(using="accounts"):
        e["user_id"] = 2
        feed.put(e)
        f = feed.put(entry(1, title="f"))
        raise ValueError
except ValueError:
    pass
print(titles(by_user.get_all(user_id=1)), titles(by_user.get_all(user_id=2)))
with transaction.atomic(using="accounts"):
    e = feed.get(e.id)
    e["user_id"] = 2
    feed.put(e)
    print(titles(by_user.get_all(user_id=1)))
print(titles(by_user.get_all(user_id=1)), titles(by_user.get_all(user_id=2)))
try:
    with feed.edit(e.id) as edited:
        edited["title"] = "lost"
        raise ValueError
except ValueError:
    print(feed.get(e.id)["title"])
""")
    assert out.splitlines() == ["['e'] []", "[]", "[] ['e']", "e"]


def test_a_savepoint_made_by_hand_takes_no_index_row_away(site: Site) -> None:
    out = site.run("""
from sharded_orm.contrib.entities import cleaner
e = feed.put(entry(1, title="e"))
alias = feed.alias_of(e.id, e.id)
with transaction.atomic(using=alias):
    savepoint = transaction.savepoint(using=alias)
    e["user_id"] = 2
    feed.put(e)
    transaction.savepoint_rollback(savepoint, using=alias)
print(titles(by_user.get_all(user_id=1)), titles(by_user.get_all(user_id=2)))
cleaner.clean_once(cleaner.CleanReport(), lambda: False)
print(titles(by_user.get_all(user_id=1)), differences())
""")
    assert out.splitlines() == ["['e'] []", "['e'] []"]


_NESTED = """
def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value
"""
_REFUSED = {
    "user_id='seven'": "InvalidProperty",
    "user_id=1.5": "InvalidProperty",
    "user_id=2**63": "InvalidProperty",
    "link='x' * 201": "InvalidProperty",
    "link=chr(0)": "InvalidProperty",
    "link=chr(0xD800)": "InvalidProperty",
    "{1: 'a'}": "InvalidProperty",
    "link=['a']": "InvalidProperty",
    "link=b'a'": "InvalidProperty",
    "link=5": "InvalidProperty",
    "user_id=[1]": "InvalidProperty",
    "user_id=float('inf')": "InvalidProperty",
    "published='0001-01-01T00:00:00+14:00'": "InvalidProperty",
    "published=[1]": "InvalidProperty",
    "published=datetime.datetime(2026, 1, 1)": "InvalidProperty",
    "seen=moment(1)": "InvalidProperty",
    "pair=(1, 2)": "InvalidProperty",
    "number=float('nan')": "InvalidProperty",
    "names={1: 'a'}": "InvalidProperty",
    "secret={1, 2}": "InvalidProperty",
    "user_id=decimal.Decimal('7.5')": "InvalidProperty",
    "user_id=10**5000": "InvalidProperty",
    "number=10**5000": "InvalidProperty",
    "nested=nested(101)": "InvalidProperty",
    "nested={'a': nested(5000)}": "InvalidProperty",
    "noise=random.randbytes(1_000_000).hex()": "EntityTooLarge",
}


def test_what_cannot_be_read_as_it_was_written_is_refused(site: Site) -> None:
    out = site.run(
        _NESTED
        + "import decimal\n"
        + "\n".join(
            f"try:\n    feed.put(Entity({properties}))\n    print({properties!r})\n"
            f"except {error} as exc: assert len(str(exc)) < 500, len(str(exc))"
            for properties, error in _REFUSED.items()
        )
        + """
print(feed.model.objects.scatter().count())
print(feed.get(feed.put(Entity(nested=nested(100))).id)["nested"] == nested(100))
try:
    by_user.get_all(user_id=decimal.Decimal("7.5"))
except InvalidProperty:
    print("refused")
"""
    )
    assert out.splitlines() == ["0", "True", "refused"]


def test_what_is_no_entity_of_the_store_is_refused(site: Site) -> None:
    out = site.run("""
from sharded_orm.exceptions import ShardKeyRequired
for value in ({"a": 1}, Entity(a=1) | {"b": 2}, None):
    try:
        feed.put(value)
    except InvalidEntity as exc:
        print(exc)
other = DataStore("other", group="accounts", fields={}, module=feed.module)
other.model = feed.model  # There is no table of its own.
try:
    posts.put(other.put(Entity(user_id=3)))
except InvalidEntity as exc:
    print("'posts'" in str(exc))
for method in (posts.get, posts.delete):
    try:
        method(uuid.uuid4(), user_id=None)
    except ShardKeyRequired as exc:
        print("user_id=None" in str(exc))
""")
    assert out.splitlines() == [
        "{'a': 1} is no Entity, as Entity(user_id=7) is.",
        "{'a': 1, 'b': 2} is no Entity, as Entity(user_id=7) is.",
        "None is no Entity, as Entity(user_id=7) is.",
        "True",
        "True",
        "True",
    ]


def test_a_damaged_body_is_named_and_stays(site: Site) -> None:
    out = site.run("""
import zlib
e = feed.put(entry(1, "a", title="e"))
for body in (b"x", zlib.compress(b"[]"), zlib.compress(b"{"), zlib.compress(b"[" * 10**5)):
    feed.model.objects.filter(id=e.id).update(body=body)
    errors = [*by_user.get_all(user_id=1).damaged]
    for work in (feed.get, lambda id: feed.edit(id).__enter__()):
        try:
            work(e.id)
            print("no error")
        except EntityDamaged as exc:
            errors.append(exc)
    print(len({str(error) for error in errors}), len(errors), str(e.id) in str(errors[0]))
    print(bytes(feed.model.objects.get(id=e.id).body) == body)
""")
    assert out.splitlines() == ["1 3 True", "True"] * 4


def test_a_large_body_is_stored_if_the_store_allows_it(site: Site) -> None:
    out = site.run("""
feed.max_body = 10**7
e = feed.put(Entity(user_id=1, text=random.randbytes(2_000_000).hex()))
print(len(feed.get(e.id)["text"]), len(by_user.get_all(user_id=1)))
""")
    assert out == "4000000 1"


def test_a_property_that_is_declared_later_is_read_by_its_field(site: Site) -> None:
    """The bodies are those of a time when the store declared no fields."""
    out = site.run("""
from sharded_orm.contrib.entities import cleaner
from sharded_orm.contrib.entities.properties import encode
old, ids = [{"published": "2026-01-01T00:00:05Z", "rank": "3"}, {}, {"published": None}, {"rank": "high"}], []
for n, properties in enumerate(old):
    ids.append(feed.put(Entity(title=n)).id)
    body = encode({}, {"title": n, "user_id": 1, "link": "a", "slug": f"{n}", **properties})
    feed.model.objects.filter(id=ids[n]).update(body=body)
print(feed.get(ids[0])["published"] == moment(5), feed.get(ids[0])["rank"], "published" in feed.get(ids[1]))
report = cleaner.CleanReport()
cleaner.clean_marked(report, min_age=0)
print(report.settled, len(report.damaged), str(ids[3]) in report.damaged[0])
print(sorted(titles(by_user.get_all(user_id=1))), titles(by_link.get_all(link="a")), titles(by_rank.get_all(user_id=1)))
try:
    feed.get(ids[3])
except EntityDamaged as exc:
    print("'rank' is 'high'" in str(exc))
""")
    assert out.splitlines() == ["True 3 False", "3 1 True", "[0, 1, 2] [0] [0]", "True"]


def test_a_value_of_a_property_that_is_declared_later_is_not_changed(site: Site) -> None:
    """If its field would change it, or no column can hold it, the body counts as damaged."""
    out = site.run("""
from sharded_orm.contrib.entities import cleaner
from sharded_orm.contrib.entities.properties import encode
misfits = [
    {"user_id": 5.5}, {"user_id": 10**30}, {"rank": "99999999999999999999"}, {"slug": 5}, {"slug": ["a"]},
    {"slug": "x" * 51}, {"slug": "a\\0b"}, {"published": "2026-01-01T00:00:00"}, {"published": 5},
]
moments = [{"published": "2026-01-01T02:00:00+02:00"}]
for properties in misfits + moments:
    e = feed.put(entry())
    feed.model.objects.filter(id=e.id).update(body=encode({}, {"link": "m", "user_id": 1, **properties}))
    try:
        print(feed.get(e.id)["published"])
    except EntityDamaged as exc:
        print(next(iter(properties)) in str(exc))
for clean in range(2):
    report = cleaner.CleanReport()
    cleaner.clean_once(report, lambda: False)
    print(len(report.damaged), report.problems, report.written, report.removed)
""")
    assert out.splitlines() == [
        *["True"] * 9,
        "2026-01-01 00:00:00+00:00",
        "9 [] 1 1",
        "9 [] 0 0",
    ]


@pytest.mark.long
def test_a_body_above_the_packet_size_is_an_error_and_nothing_is_stored(tmp_path: Path) -> None:
    """max_body is to be half of it at most."""
    with mortal_site("mariadb", tmp_path, max_allowed_packet="1M") as (site, _):
        out = site.run("""
from django.db import OperationalError
feed.max_body = 10**7
large = entry(1, "a", text=random.randbytes(2_000_000).hex())
try:
    feed.put(large)
except OperationalError:
    print(large.version)
connections.close_all()  # As at the end of a request.
print(feed.get_many([large.id]), titles(by_user.get_all(user_id=1)))
del large["text"]
print(feed.put(large).version, len(by_user.get_all(user_id=1)))
""")
    assert out.splitlines() == ["0", "{} []", "1 1"]


def test_a_unique_value_has_one_owner(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
from concurrent.futures import ThreadPoolExecutor
def claim(n):
    try:
        feed.put(entry(n, slug="wanted", title=n))
        return 1
    except UniqueValueTaken:
        return 0
    finally:
        connections.close_all()
with ThreadPoolExecutor(4) as threads:
    print(sum(threads.map(claim, range(12))))
(owner,) = by_slug.get_all(slug="wanted")
other = feed.put(entry(1, slug="other"))
try:
    other["slug"] = "wanted"
    feed.put(other)
except UniqueValueTaken:
    print(feed.get(other.id)["slug"])
owner["slug"] = "new"
feed.put(owner)
print(claim(20), titles(by_slug.get_all(slug="wanted")), len(by_slug.get_all(slug="new")))
feed.delete(owner.id)
print(claim(21), [claim(22) for _ in "x"])
owner = Entity(slug="new", title="again")
feed.put(owner)
print(titles(by_slug.get_all(slug="new")))
# A reservation of a writer that has died gives way.
from sharded_orm.contrib.entities import reservations
reservations.reserve(by_slug, reservations.IndexRow(("reserved",), uuid.uuid4(), uuid.uuid4(), 1))
feed.put(Entity(slug="reserved", title="r"))
print(titles(by_slug.get_all(slug="reserved")))
""")
    assert out.splitlines() == [
        "1",
        "other",
        "1 [20] 1",
        "0 [0]",
        "['again']",
        "['r']",
    ]


#: Makes entities that are not on certain shards.
_ELSEWHERE = """
from sharded_orm.contrib.entities import index_rows
def elsewhere(slug, *aliases):
    while True:
        e = Entity(slug=slug)
        if feed.alias_of(e.id, e.id) not in aliases:
            return e
def home(e):
    return feed.alias_of(e.id, e.id)
"""


def test_a_unique_value_is_not_free_until_its_owner_has_committed(site_everywhere: Site) -> None:
    out = site_everywhere.run(
        _ELSEWHERE
        + """
row = index_rows.alias_of(by_slug, "x")
a = feed.put(elsewhere("x", row))
b = elsewhere("x", row, home(a))
try:
    with sharded_orm.atomic(feed.model, id=a.id):
        feed.delete(a.id)
        try:
            feed.put(b)
        finally:
            raise KeyError
except KeyError:
    print([e.id == a.id for e in by_slug.get_all(slug="x")], feed.get_many([b.id]))
feed.delete(a.id)
feed.put(b)
print([e.id == b.id for e in by_slug.get_all(slug="x")])
"""
    )
    assert out.splitlines() == ["[True] {}", "[True]"]


def test_a_unique_row_is_committed_with_its_entity_or_the_put_is_refused(
    site_everywhere: Site,
) -> None:
    out = site_everywhere.run(
        _ELSEWHERE
        + """
row = index_rows.alias_of(by_slug, "x")
a = elsewhere("x", row)
for alias in (row, "accounts"):
    with transaction.atomic(using=alias):
        try:
            feed.put(a)
        except ReservationRefused:
            print(a.version)
with transaction.atomic(using=home(a)):
    feed.put(a)
feed.delete(a.id)
others = {shard.alias for shard in runtime.group("accounts").shards()} - {row}
b = elsewhere("x", *others)
with transaction.atomic(using=home(b)):
    # On SQLite, nobody would wait for the commit of this transaction.
    try:
        feed.put(b)
        print(connections[row].vendor != "sqlite")
    except UniqueValueTaken:
        print(connections[row].vendor == "sqlite")
print(feed.get_many([a.id]))
"""
    )
    assert out.splitlines() == ["0", "0", "True", "{}"]


def test_a_reservation_that_is_being_taken_away_is_not_confirmed(site_everywhere: Site) -> None:
    """The row is gone only when the transaction of the other entity is committed."""
    out = site_everywhere.run(
        _ELSEWHERE
        + """
from threading import Event, Thread
from sharded_orm.contrib.entities import reservations
row = index_rows.alias_of(by_slug, "x")
aliases = {shard.alias for shard in runtime.group("accounts").shards()}
a, b = elsewhere("x", row), elsewhere("x", *(aliases - {row}))
reserved, taken, reserve = Event(), Event(), reservations.reserve
def reserve_and_wait(index, row):
    reserve(index, row)
    if row.entity_id == a.id and not taken.is_set():
        reserved.set()
        taken.wait()
reservations.reserve = reserve_and_wait
def put_a():
    try:
        feed.put(a)
    except UniqueValueTaken:
        pass
    finally:
        connections.close_all()
writer = Thread(target=put_a)
writer.start()
reserved.wait()
try:
    with transaction.atomic(using=row):
        try:
            feed.put(b)
        finally:
            taken.set()
        writer.join(0.3)  # It waits for this transaction.
except UniqueValueTaken:
    pass
writer.join()
print(len(feed.get_many([a.id, b.id])), len(by_slug.get_all(slug="x")))
"""
    )
    assert out == "1 1"


def test_a_change_by_others_is_not_lost_after_a_rollback(site: Site) -> None:
    """Their version has the number of the one that was rolled back."""
    out = site.run("""
e = feed.put(entry(title="first"))
try:
    with sharded_orm.atomic(feed.model, id=e.id):
        e["title"] = "rolled back"
        feed.put(e)
        raise KeyError
except KeyError:
    pass
with feed.edit(e.id) as other:
    other["title"] = "of others"
try:
    feed.put(e)
except EntityChanged:
    print(feed.get(e.id)["title"])
""")
    assert out == "of others"


def test_an_entity_keeps_the_shard_key_of_its_store(site: Site) -> None:
    out = site.run("""
from sharded_orm.exceptions import ShardKeyChanged, ShardKeyRequired
p = posts.put(Entity(user_id=3, topic="t"))
for attempt in (
    lambda: posts.put(Entity(topic="t")),
    lambda: posts.get(p.id),
    lambda: posts.get(p.id, topic="t"),
    lambda: posts.put(p.__class__({**p, "user_id": 4}, id=p.id)),
    lambda: feed.get(p.id, user_id=3),
):
    try:
        attempt()
        print("stored")
    except (ShardKeyChanged, ShardKeyRequired, EntityExists) as exc:
        print(type(exc).__name__)
p["user_id"] = 4
try:
    posts.put(p)
except ShardKeyChanged:
    print(posts.get(p.id, user_id=3).version)
with posts.edit(p.id, user_id=3) as e:
    e["topic"] = "u"
print(len(by_topic.get_all(topic="t")), len(by_topic.get_all(topic="u")))
for user in range(5, 9):  # Some of them are on other shards.
    for attempt in (posts.get, posts.delete, lambda id, **key: posts.edit(id, **key).__enter__()):
        try:
            attempt(p.id, user_id=user)
            print("found under", user)
        except EntityNotFound as exc:
            assert f"user_id={user}" in str(exc)
print(posts.get(p.id, user_id=3).version, posts.get_many([p.id], user_id=5))
posts.delete(p.id, user_id=3)
print(len(by_topic.get_all(topic="u")))
""")
    assert out.splitlines() == [
        "ShardKeyRequired",
        "ShardKeyRequired",
        "ShardKeyRequired",
        "stored",
        "ShardKeyRequired",
        "1",
        "0 1",
        "2 {}",
        "0",
    ]


_DECLARATIONS = [
    'DataStore("other", group="accounts", fields={"text": models.TextField()}, module=M)',
    'DataStore("other", group="accounts", fields={"body": models.IntegerField()}, module=M)',
    'DataStore("other", group="accounts", fields={"n": models.IntegerField(null=True)}, module=M)',
    'DataStore("other", group="accounts", fields={}, shard_on="n", module=M)',
    'DataStore("feed", group="accounts", fields={}, module="elsewhere")',
    'DataStore("an other", group="accounts", fields={}, module=M)',
    'DataStore("x" * 60, group="accounts", fields={}, module=M)',
    'DataStore("other", group="accounts", fields={"at": models.TimeField()}, module=M)',
    'DataStore("other", group="accounts", fields={"at": models.DateTimeField(auto_now=True)}, module=M)',
    'DataStore("other", group="accounts", fields={"at": models.DateField(auto_now_add=True)}, module=M)',
    'DataStore("other", group="accounts", fields={"n": models.IntegerField(unique=True)}, module=M)',
    'DataStore("other", group="accounts", fields={"n": models.IntegerField}, module=M)',
    *(
        f'DataStore("other", group="accounts", fields={{{name!r}: models.IntegerField()}}, module=M)'
        for name in (
            "limit",
            "after",
            "save",
            "objects",
            "pk",
            "entity_id",
            "_state",
            "a__b",
            "a_",
            "a b",
        )
    ),
    'Index(feed, "index user", ["user_id"], "user_id")',
    'Index(feed, "feed_entity", ["user_id"], "user_id")',
    'Index(feed, "INDEX_user", ["user_id"], "user_id")',
    'Index(feed, "index_x", "rank", "rank")',
    'Index(feed, "index_user", ["user_id"], "user_id")',
    'Index(feed, "index_x", ["color"], "color")',
    'Index(feed, "index_x", ["user_id"], "link")',
    'Index(feed, "index_x", ["user_id", "-user_id"], "user_id")',
    'Index(feed, "index_topic", ["user_id"], "user_id")',
]


def test_a_declaration_that_cannot_work_is_refused(site: Site) -> None:
    out = site.run(
        "M = feed.module\n"
        + "\n".join(
            f"try:\n    {declaration}\n    print({declaration!r})\nexcept InvalidStore: pass"
            for declaration in _DECLARATIONS
        )
    )
    assert out == ""


def test_a_field_may_have_any_name_that_django_allows(site: Site) -> None:
    out = site.run("""
fields = {name: models.IntegerField() for name in ("_rank", "class", "größe")}
store = DataStore("other", group="accounts", fields=fields, module=feed.module)
Index(store, "index_other", ["_rank", "-class", "größe"], "_rank")
print(store.indexes[0].names)
""")
    assert out == "('_rank', 'class', 'größe')"


def test_an_id_that_is_none_is_named(site: Site) -> None:
    out = site.run("""
for work in (
    lambda id: Entity(id=id),
    lambda id: feed.get(id),
    lambda id: feed.get_many([id]),
    lambda id: feed.delete(id),
    lambda id: feed.edit(id).__enter__(),
):
    for id in ("7", 7, b"a"):
        try:
            work(id)
            print("no error")
        except InvalidEntityId as exc:
            assert repr(id) in str(exc)
""")
    assert out == ""
