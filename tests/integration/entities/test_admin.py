"""The pages of entities in the admin."""

from __future__ import annotations

from tests.integration.entities.site import Site


def test_the_admin_shows_entities_and_changes_none(site: Site) -> None:
    out = site.run("""
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
settings.ALLOWED_HOSTS = ["testserver"]
e = feed.put(entry(7, "l", title="A <b>title</b>"))
broken = feed.put(entry(7, "l"))
feed.model.objects.filter(id=broken.id).update(body=b"x")
client = Client()
client.force_login(User.objects.create_superuser("ada"))
page = client.get("/admin/feeds/feedentity/")
print(page.status_code, str(e.id) in page.content.decode(), "damaged" in page.content.decode())
row = feed.model.objects.get(id=e.id)
link = [u for u in __import__("re").findall(r'href="([^"]*)"', page.content.decode()) if str(row.pk) in u or str(e.id) in u][0].replace("&amp;", "&")
page = client.get(link, follow=True)
text = page.content.decode()
print(page.status_code, "A &lt;b&gt;title" in text, 'name="_save"' in text, "deletelink" in text)
p = posts.put(Entity(user_id=3, topic="t"))
print(client.get("/admin/feeds/postsentity/").status_code)
print(client.post(link, {"version": 5}).status_code, feed.get(e.id).version)
""")
    assert out.splitlines() == ["200 True True", "200 True False False", "200", "403 1"]


def test_the_admin_finds_an_entity_by_its_id(site_everywhere: Site) -> None:
    out = site_everywhere.run("""
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
settings.ALLOWED_HOSTS = ["testserver"]
client = Client()
client.force_login(User.objects.create_superuser("ada"))
ids = [feed.put(entry(n)).id for n in range(3)]
post = posts.put(Entity(user_id=3, topic="t"))
def shown(store, text):
    page = client.get(f"/admin/feeds/{store}entity/", {"q": text}).content.decode()
    # An address has the primary key and the key.
    return [n for n, id in enumerate([*ids, post.added_id]) if f"/{id}" in page or f"~{id}/" in page]
for text in (str(ids[1]), f" {ids[1].hex.upper()} ", "", "no id", str(uuid.uuid4())):
    print(shown("feed", text))
print(shown("posts", str(post.id)), shown("posts", str(uuid.uuid4())))
""")
    assert out.splitlines() == ["[1]", "[1]", "[0, 1, 2]", "[]", "[]", "[3] []"]


def test_a_body_that_no_page_can_have_leaves_the_list_as_it_is(site: Site) -> None:
    out = site.run("""
import json, zlib
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
settings.ALLOWED_HOSTS = ["testserver"]
client = Client()
client.force_login(User.objects.create_superuser("ada"))
e = feed.put(entry(1, title=chr(0xD800)))
nested = zlib.compress(b'{"title": ' + b"[" * 400 + b"]" * 400 + b"}")
for body in (None, nested, zlib.compress(b"[" * 10**5)):
    if body is not None:
        feed.model.objects.filter(id=e.id).update(body=body)
    for address in ("", f"{e.id}~{e.added_id}/change/"):
        page = client.get(f"/admin/feeds/feedentity/{address}")
        text = page.content.decode()
        print(page.status_code, [word for word in ("ud800", "damaged") if word in text])
""")
    assert out.splitlines() == [
        *["200 ['ud800']"] * 2,
        *["200 []"] * 2,
        *["200 ['damaged']"] * 2,
    ]


def test_a_lookup_by_the_body_is_refused_as_django_refuses_lookups(site: Site) -> None:
    out = site.run("""
import logging
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
settings.ALLOWED_HOSTS = ["testserver"]
logging.getLogger("django").addHandler(logging.NullHandler())
client = Client(raise_request_exception=False)
client.force_login(User.objects.create_superuser("ada"))
e = feed.put(entry(1))
for lookup in ("body=x", "body__gt=x", "body__in=x", "_shard=accounts_00001&body=x", f"version=1&body={e.id}", "version=1"):
    print(client.get(f"/admin/feeds/feedentity/?{lookup}").status_code)
""")
    assert out.splitlines() == [*["400"] * 5, "200"]
