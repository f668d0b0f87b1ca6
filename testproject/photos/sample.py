"""Sample content, generated once.

People, albums and numbers of photos are the same in every run. The scene of a photo is not: it
depends on the photo's id, which either ticket server may have given.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.utils.timezone import now

import sharded_orm
from sharded_orm import runtime
from sharded_orm.contrib.mirrors.build import find_mirror
from sharded_orm.contrib.mirrors.comparison import compare
from testproject.photos.models import Album, Comment, Photo, PhotoTag
from testproject.photos.scenes import scene

PEOPLE = [
    "Ada Okafor", "Bela Novak", "Chidi Maier", "Dana Lindqvist", "Emil Sato", "Farah Haddad",
    "Gita Rao", "Hugo Silva", "Ines Moreau", "Jonas Weber", "Kaya Demir", "Lena Petrova",
]  # fmt: skip
ALBUMS = ["Up north", "Coast roads", "First snow", "Harvest", "Night walks", "The long valley"]
# The titles and tags of a photo depend on its scene.
WHAT = {
    "ridges": ["Ridge", "Pass", "The long way down", "Seven ridges"],
    "lake": ["Lake", "Fjord", "Still water", "The far shore"],
    "sea": ["Shore", "Bay", "Headland", "Nothing but water"],
    "dunes": ["Dunes", "Sand", "A hill that moves", "Footprints gone"],
    "forest": ["Pines", "Clearing", "Fog in the firs", "Above the wood"],
}
WHEN = {
    "dawn": ["at dawn", "before breakfast", "in first light"],
    "day": ["at noon", "in August", "after the rain"],
    "dusk": ["in late light", "at dusk", "on the way home"],
    "night": ["by moonlight", "at night", "under the stars"],
}
TAGS = {
    "ridges": ["mountains", "hiking"],
    "lake": ["lake", "mountains", "reflection"],
    "sea": ["sea", "coast"],
    "dunes": ["dunes", "sand", "hiking"],
    "forest": ["forest", "fog", "hiking"],
    "dawn": ["dawn", "first light"],
    "day": ["summer", "blue sky"],
    "dusk": ["sunset", "golden hour"],
    "night": ["night", "moon", "long exposure"],
}
WORDS = [
    "What a light!", "I was there last year, it looked just the same.", "Where is this?",
    "The trees on the left make it.", "Lovely colours.", "Did you walk all the way up?",
    "This one belongs on a wall.", "Reminds me of home.",
]  # fmt: skip


@dataclass(frozen=True)
class Made:
    """What a call of :func:`make` has added."""

    users: int
    photos: int
    tags: int
    comments: int


def make() -> Made:
    """Fill the site. People who have photos are skipped, so a second call adds nothing.

    Tags, and the authors' copies of comments, are added wherever they are missing, so to older content
    as well.
    """
    people = [_person(name) for name in PEOPLE]
    made_photos = made_tags = made_comments = 0
    for number, (owner, _) in enumerate(people):
        # Seeded by the person, so that the content of one person does not depend on the others.
        chance = random.Random(number)
        with sharded_orm.atomic(Photo, owner=owner):
            if not Album.objects.filter(owner=owner).exists():
                photos = _photos(owner, chance)
                made_photos += len(photos)
                made_comments += _comments(owner, photos, [user for user, _ in people], chance)
            made_tags += _tags(owner, chance)
    for _ in compare(find_mirror("photos.WrittenComment"), repair=True):
        pass
    return Made(sum(new for _, new in people), made_photos, made_tags, made_comments)


def _person(name: str) -> tuple[Any, bool]:
    first, last = name.split()
    user, new = get_user_model().objects.get_or_create(
        username=first.lower(), defaults={"first_name": first, "last_name": last}
    )
    if new:
        user.set_unusable_password()  # nobody logs in as a sample user
        user.save(update_fields=["password"])
    return user, new


def _photos(owner: Any, chance: random.Random) -> list[Photo]:
    titles = chance.sample(ALBUMS, chance.randrange(2, 4))
    albums = Album.objects.bulk_create(Album(owner=owner, title=title) for title in titles)
    # The ids are drawn before the rows are created, as titles depend on the pictures.
    field: Any = Photo._meta.pk
    ids = runtime.tickets().take(field.sequence_name, chance.randrange(8, 18))
    photos = Photo.objects.bulk_create(
        Photo(
            photo_id=photo_id,
            owner=owner,
            album=chance.choice(albums),
            title=_title(photo_id, chance),
            posted_at=now() - timedelta(minutes=chance.randrange(60 * 24 * 365)),
        )
        for photo_id in ids
    )
    return list(photos)


def _title(photo_id: int, chance: random.Random) -> str:
    shown = scene(photo_id)
    return f"{chance.choice(WHAT[shown.land])} {chance.choice(WHEN[shown.time])}"


def _tags(owner: Any, chance: random.Random) -> int:
    if PhotoTag.objects.filter(owner=owner).exists():
        return 0
    tags = []
    for photo in Photo.objects.filter(owner=owner):
        shown = scene(photo.photo_id)
        words = [*TAGS[shown.land], *TAGS[shown.time]]
        for text in chance.sample(words, chance.randrange(2, 5)):
            tags.append(PhotoTag(owner=owner, photo=photo, text=text))
    PhotoTag.objects.bulk_create(tags)
    return len(tags)


def _comments(owner: Any, photos: list[Photo], people: list[Any], chance: random.Random) -> int:
    comments = [
        Comment(
            owner=owner,
            photo=photo,
            author=chance.choice(people),
            text=chance.choice(WORDS),
            posted_at=min(now(), photo.posted_at + timedelta(hours=chance.randrange(1, 200))),
        )
        for photo in photos
        for _ in range(chance.randrange(0, 5))
    ]
    Comment.objects.bulk_create(comments)
    return len(comments)
