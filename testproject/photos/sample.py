"""Sample content, made on the spot: the same in every run, and once only."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction
from django.utils.timezone import now

import sharded_orm
from testproject.photos.models import Album, Comment, Photo, PhotoOwner

PEOPLE = [
    "Ada Okafor", "Bela Novak", "Chidi Maier", "Dana Lindqvist", "Emil Sato", "Farah Haddad",
    "Gita Rao", "Hugo Silva", "Ines Moreau", "Jonas Weber", "Kaya Demir", "Lena Petrova",
]  # fmt: skip
ALBUMS = ["Up north", "Coast roads", "First snow", "Harvest", "Night walks", "The long valley"]
WHAT = ["Ridge", "Dunes", "Pines", "Fjord", "Moor", "Pass", "Shore", "Meadow", "Cliffs", "Lake"]
WHEN = ["at dawn", "before the rain", "in August", "after the storm", "at noon", "in late light"]
WORDS = [
    "What a light!", "I was there last year, it looked just the same.", "Where is this?",
    "The trees on the left make it.", "Lovely colours.", "Did you walk all the way up?",
    "This one belongs on a wall.", "Reminds me of home.",
]  # fmt: skip


@dataclass(frozen=True)
class Made:
    """How much a call of :func:`make` added."""

    users: int
    photos: int
    comments: int


def make() -> Made:
    """Fill the site. Who has photos already is left alone, so a second call adds nothing.

    The content of one person commits on the shard and in the global database one after
    the other; a call that was interrupted is completed by the next one.
    """
    people = [_person(name) for name in PEOPLE]
    made_photos = made_comments = 0
    for number, (owner, _) in enumerate(people):
        # Seeded by the person: what is made for one does not depend on the others.
        chance = random.Random(number)
        with sharded_orm.atomic(Photo, owner=owner), transaction.atomic():
            if Album.objects.filter(owner=owner).exists():
                continue
            photos = _photos(owner, chance)
            comments = _comments(owner, photos, [user for user, _ in people], chance)
        made_photos += len(photos)
        made_comments += comments
    return Made(sum(new for _, new in people), made_photos, made_comments)


def _person(name: str) -> tuple[Any, bool]:
    first, last = name.split()
    user, new = get_user_model().objects.get_or_create(
        username=first.lower(), defaults={"first_name": first, "last_name": last}
    )
    if new:
        user.set_unusable_password()  # Nobody logs in as them.
        user.save(update_fields=["password"])
    return user, new


def _photos(owner: Any, chance: random.Random) -> list[Photo]:
    titles = chance.sample(ALBUMS, chance.randrange(2, 4))
    albums = Album.objects.bulk_create(Album(owner=owner, title=title) for title in titles)
    photos = Photo.objects.bulk_create(
        Photo(
            owner=owner,
            album=chance.choice(albums),
            title=f"{chance.choice(WHAT)} {chance.choice(WHEN)}",
            posted_at=now() - timedelta(minutes=chance.randrange(60 * 24 * 365)),
        )
        for _ in range(chance.randrange(8, 18))
    )
    PhotoOwner.objects.bulk_create(
        [PhotoOwner(photo_id=photo.photo_id, owner=owner) for photo in photos],
        # Left by a call that was interrupted between the two commits.
        ignore_conflicts=True,
    )
    return list(photos)


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
