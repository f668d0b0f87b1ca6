"""Pages of indexes: complete, in order, without doubles, whatever the index rows are like."""

from __future__ import annotations

from tests.integration.entities.site import Site

#: Many entities with few values, so that most are ties, and stale rows of all kinds between them.
_MANY = """
from sharded_orm.contrib.entities import index_rows
random.seed(7)
entities = [
    feed.put(entry(1, "a", random.randrange(4), rank=random.randrange(3), slug=f"s{random.randrange(3)} {n}", title=n))
    for n in range(40)
]
for e in random.sample(entities, 20):
    # The rows of former properties stay until a cleaner removes them.
    e["published"], e["rank"] = moment(random.randrange(4)), random.randrange(3)
    feed.put(e)
for e in random.sample(entities, 5):
    feed.delete(e.id)
    entities.remove(e)
"""


def test_pages_are_full_and_in_order_between_stale_rows(site_everywhere: Site) -> None:
    out = site_everywhere.run(
        _MANY
        + """
for index, properties, key in (
    (by_link, {"link": "a"}, lambda e: -e["published"].timestamp()),
    (by_rank, {"user_id": 1}, lambda e: (-e["rank"], e["slug"])),
):
    for limit in (1, 3, 7, 35, 100):
        found = every(index, limit=limit, **properties)
        assert list(map(key, found)) == sorted(map(key, entities)), (index.name, limit)
        assert len({e.id for e in found}) == len(entities)
page = by_link.get_all(link="a", limit=35)
print(len(page), page.after is None or by_link.get_all(link="a", after=page.after).entities == [])
print(sorted(titles(by_link.get_all(link="a", published=moment(2)))) == sorted(e["title"] for e in entities if e["published"] == moment(2)))
"""
    )
    assert out.splitlines() == ["35 True", "True"]


def test_without_the_second_filter_a_page_is_wrong(site: Site) -> None:
    """The check that stale rows are skipped is what makes pages right."""
    out = site.run(
        _MANY
        + """
by_link.is_current = lambda entity, values: True
found = every(by_link, link="a")
print([e["published"] for e in found] == sorted((e["published"] for e in found), reverse=True), len(found) == len({e.id for e in found}))
"""
    )
    assert out == "False False"


def test_a_cursor_keeps_its_place_while_others_write(site: Site) -> None:
    out = site.run("""
for n in range(6):
    feed.put(entry(1, "a", 10 - n // 2, title=n))
page = by_link.get_all(link="a", limit=3)
feed.put(entry(1, "a", 11, title="newer"))
feed.delete(page[2].id)
rest = by_link.get_all(link="a", limit=10, after=page.after)
print(len({*titles(page), *titles(rest)}), len(page) + len(rest), rest.after)
for cursor in ("!", "WzFd", page.after + "A"):
    try:
        by_link.get_all(link="a", after=cursor)
    except InvalidIndexCursor:
        print("refused")
""")
    assert out.splitlines() == ["6 6 None", "refused", "refused", "refused"]


_UNANSWERABLE = [
    "by_link.get_all()",
    "by_link.get_all(published=moment(1))",
    "by_link.get_all(link='a', user_id=1)",
    "by_link.get_all(link='a', limit=0)",
    "by_rank.get_all(user_id=1, slug='s')",
]


def test_a_query_that_an_index_cannot_answer_is_refused(site: Site) -> None:
    out = site.run(
        "\n".join(
            f"try:\n    {call}\n    print({call!r})\nexcept InvalidIndexQuery: pass"
            for call in _UNANSWERABLE
        )
    )
    assert out == ""


def test_a_cursor_that_no_page_has_given_is_refused(site: Site) -> None:
    out = site.run(r"""
import base64
for text in ('[1e999]', '[' * 6000, '["\\u0000"]', '["\\ud800"]', '[5, 5]', '{}', '[null]', '[[1], 2]', 'x'):
    for index, properties in ((by_link, {"link": "a"}), (by_rank, {"user_id": 1}), (by_user, {"user_id": 1})):
        cursor = base64.urlsafe_b64encode(text.encode()).decode()
        try:
            index.get_all(after=cursor, **properties)
            print(index.name, text)
        except InvalidIndexCursor:
            pass
""")
    assert out == ""


def test_the_entities_of_a_page_cost_a_round_trip_per_node(site_everywhere: Site) -> None:
    # With these ids, entities are on all shards. Random ids would leave out one now and then.
    out = site_everywhere.run("""
from uuid import UUID
for n in range(30):
    feed.put(entry(1, "a", n, id=UUID(int=n)))
by_user.get_all(user_id=1)
sent = []
from django.db.backends.utils import CursorWrapper
wrapped = CursorWrapper.execute
def execute(self, sql, params=None):
    if "feeds_" in str(sql):
        sent.append(sql)
    return wrapped(self, sql, params)
CursorWrapper.execute = execute
from sharded_orm.backends.mysql.node_cursor import NodeCursor
sent_ahead = NodeCursor.send
def send(self, sql, params=None):
    sent.append(sql)
    sent_ahead(self, sql, params)
NodeCursor.send = send
page = by_user.get_all(user_id=1, limit=30)
print(len(page), len([s for s in sent if "feeds_index_user" in s]), len([s for s in sent if "feeds_feed_entities" in s]))
""")
    # On SQLite, each shard is a file of its own, and none is a round trip away.
    assert out == ("30 1 4" if site_everywhere.backend == "sqlite3" else "30 1 2")


def test_a_damaged_body_is_named_and_the_rest_is_served(site: Site) -> None:
    out = site.run("""
entities = [feed.put(entry(1, "a", n, title=n)) for n in range(5)]
broken = entities[2]
feed.model.objects.filter(id=broken.id).update(body=b"x" + bytes(9))
page = by_link.get_all(link="a", limit=4)
print(titles(page), [d.entity_id == broken.id for d in page.damaged])
for read in (lambda: feed.get(broken.id), lambda: feed.get_many([e.id for e in entities])):
    try:
        read()
    except EntityDamaged as exc:
        print(str(broken.id) in str(exc), sorted(titles(exc.others.values())))
feed.delete(broken.id)
print(titles(by_link.get_all(link="a")), by_link.get_all(link="a").damaged)
""")
    assert out.splitlines() == [
        "[4, 3, 1, 0] [True]",
        "True []",
        "True [0, 1, 3, 4]",
        "[4, 3, 1, 0] []",
    ]


def test_an_entity_that_moves_while_a_page_is_read_is_in_it_once(site: Site) -> None:
    """Stale rows let the page be read in two steps. The entity is behind the first one by then."""
    out = site.run("""
e = feed.put(entry(1, "a", 30, title="moves"))
for n in (20, 21):
    f = feed.put(entry(1, "a", n))
    f["link"] = "b"
    feed.put(f)
feed.put(entry(1, "a", 2, title="other"))
def load_and_move(keys):
    del feed.load
    states = feed.load(keys)
    with feed.edit(e.id) as moved:
        moved["published"] = moment(1)
    return states
feed.load = load_and_move
page = by_link.get_all(link="a", limit=3)
print(titles(page), page.after, titles(by_link.get_all(link="a", limit=3)))
""")
    assert out == "['moves', 'other'] None ['other', 'moves']"


def test_no_table_is_scanned_for_the_entities_of_a_page(site: Site) -> None:
    """In a store that is sharded by a property, only the pair of the property and the id has an index."""
    del site.content["sharded_orm"]["PLACEMENT_LEASE"]
    site.save()
    out = site.run("""
for n in range(8):
    posts.put(Entity(user_id=n, topic="a", title=n))
from django.db.backends.utils import CursorWrapper
wrapped = CursorWrapper.execute
scanned = []
def execute(self, sql, params=None):
    if sql.startswith("SELECT") and "feeds_posts_entities" in sql:
        wrapped(self, f"EXPLAIN QUERY PLAN {sql}", params)
        scanned.extend(row for row in self.fetchall() if "SCAN" in str(row))
    return wrapped(self, sql, params)
CursorWrapper.execute = execute
print(sorted(titles(by_topic.get_all(topic="a"))), scanned)
""")
    assert out == "[0, 1, 2, 3, 4, 5, 6, 7] []"
