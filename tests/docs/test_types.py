"""The types of the package, as mypy sees them in a project that has installed the wheel.

The project uses the plugin of django-stubs, without which Django's own models have no types.
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.distribution import Installation
from tests.docs.markdown import DOCS, blocks

CONFIGURATION = """
[mypy]
strict = true
plugins = mypy_django_plugin.main

[mypy.plugins.django-stubs]
django_settings_module = site_settings
"""

SETTINGS = """
from sharded_orm.topology.aliases import sharded_databases

SECRET_KEY = "types"
INSTALLED_APPS = ["sharded_orm", "django.contrib.contenttypes", "photos"]
DATABASES = sharded_databases(
    {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
)
DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]
SHARDED_ORM = {
    "NODES": {"node": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "shards"}},
    "GROUPS": {
        "photos": {"STRATEGY": "modulo", "RANGES": [{"range": (0, 3), "primary": "node"}]},
    },
}
"""

MODELS = """
from typing import ClassVar

from django.db import models

from sharded_orm import GlobalModel, ShardedModel, TicketField
from sharded_orm.models import ShardedManager, ShardedQuerySet


class PhotoQuerySet(ShardedQuerySet["Photo"]):
    def titled(self, title: str) -> "PhotoQuerySet":
        return self.filter(title=title)


PhotoManager = ShardedManager.from_queryset(PhotoQuerySet)


class OfUser(ShardedModel):
    user_id = models.BigIntegerField()

    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"


class Photo(OfUser):
    photo_id = TicketField(primary_key=True)
    title = models.CharField(max_length=200)

    objects: ClassVar["PhotoManager[Photo]"] = PhotoManager()


class Comment(OfUser):
    photo = models.ForeignKey(Photo, models.CASCADE, related_name="comments")
    text = models.TextField()


class NoteManager(ShardedManager["Note"]):
    def warm(self) -> ShardedQuerySet["Note"]:
        return self.filter(text="Warm!")


class Note(OfUser):
    text = models.TextField()

    objects: ClassVar[NoteManager] = NoteManager()


class Tag(GlobalModel):
    name = models.CharField(max_length=50)
"""

USE = """
from typing import assert_type

import sharded_orm
from photos.models import Comment, Note, Photo, PhotoQuerySet, Tag
from sharded_orm.models import ShardedQuerySet


def rows(user_id: int) -> None:
    mine = Comment.objects.filter(user_id=user_id)
    assert_type(mine, ShardedQuerySet[Comment])
    assert_type(mine.get(), Comment)
    assert_type(mine.first(), Comment | None)
    assert_type(mine[0], Comment)
    assert_type(mine[:3], ShardedQuerySet[Comment])
    assert_type([comment.text for comment in mine], list[str])
    assert_type(mine.count(), int)
    assert_type(Comment.objects.create(user_id=user_id, text="Warm!"), Comment)
    assert_type(Comment.objects.get(user_id=user_id, pk=1).photo, Photo)
    assert_type(Comment.objects.get_or_create(user_id=user_id)[0], Comment)
    assert_type(Comment.objects.scatter().order_by("-pk")[:3], ShardedQuerySet[Comment])
    assert_type(Comment.objects.count(), int)
    assert_type(mine.explain_routing().aliases, tuple[str, ...])
    assert_type(Photo.objects.titled("Sea").scatter(), PhotoQuerySet)
    assert_type(Photo.objects.get(user_id=user_id), Photo)
    assert_type(Photo.objects.create(user_id=user_id).photo_id, int)
    # The plugin gives managers of relations no types for these methods, and no false errors.
    Photo().comments.get().text.upper()
    assert_type(Note.objects.warm().get(), Note)
    assert_type(Tag.objects.get(name="sea"), Tag)


async def later(user_id: int) -> None:
    assert_type(await Comment.objects.aget(user_id=user_id), Comment)
    assert_type([c async for c in Comment.objects.filter(user_id=user_id)], list[Comment])


def blocks(user_id: int) -> str:
    with sharded_orm.atomic(Photo, user_id=user_id), sharded_orm.bound(user_id=user_id):
        return Photo.objects.get(title="Sea").title


@sharded_orm.bound(user_id=1)
def decorated(number: int) -> str:
    return str(number)


assert_type(decorated(1), str)
decorated("1")  # type: ignore[arg-type]
Photo.objects.scattter()  # type: ignore[attr-defined]
Photo.objects.get(user_id=1).title.photos  # type: ignore[attr-defined]
"""


def test_a_project_sees_the_types(installation: Installation, tmp_path: Path) -> None:
    # Strict mypy also reports each "type: ignore" below which there is no error.
    files = {
        "mypy.ini": CONFIGURATION,
        "site_settings.py": SETTINGS,
        "photos/__init__.py": "",
        "photos/models.py": MODELS,
        "photos/use.py": USE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = installation.run(["-m", "mypy", "photos"], tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_page_shows_this_configuration() -> None:
    page = DOCS / "howto" / "test-your-project.md"
    shown = [block.code for block in blocks(page) if block.language == "ini"]
    assert [code.replace("photosite.settings", "site_settings").strip() for code in shown] == [
        CONFIGURATION.strip()
    ]
