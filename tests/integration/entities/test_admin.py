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
