"""Entities are stored, found and changed."""

from __future__ import annotations

from tests.integration.entities.site import Site


def test_an_entity_is_stored_and_found_by_its_indexes(site_everywhere: Site) -> None:
    site = site_everywhere
    out = site.run("""
e = feed.put(entry(7, "https://example.org/", 5, title="Ünï", tags=["a", {"b": None}], slug="s"))
again = feed.get(e.id)
print(again == e, again.version, dict(again) == dict(e), again.added_id == e.added_id)
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
