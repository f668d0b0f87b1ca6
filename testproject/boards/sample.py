"""Sample boards: some people each get a board, and pin photos of all people to it."""

from __future__ import annotations

import random

from django.contrib.auth import get_user_model

import sharded_orm
from testproject.boards.models import MemberBoards, member_of, new_board, pin_photo
from testproject.photos.models import Photo
from testproject.photos.sample import PEOPLE

TITLES = {
    "Walls of my room": "Large ones only.",
    "To walk one day": "Paths, passes and the way there.",
    "Blue hours": "",
}
NOTES = ["", "", "The light!", "For the winter", "Ask where this is", "My favourite"]
BOARDS = 8


def make() -> int:
    """Create the sample boards, and return the number of pins. People who have boards are skipped."""
    # People and photos are read in a fixed order, so that each run creates the same boards.
    photos = list(Photo.objects.scatter().order_by("photo_id").values_list("photo_id", flat=True))
    titles = list(TITLES.items())
    pins = 0
    for number, name in enumerate(PEOPLE[:BOARDS]):
        chance = random.Random(number)
        user = get_user_model().objects.get(username=name.split()[0].lower())
        member = member_of(user)
        if MemberBoards.objects.count(member):
            continue
        board = new_board(member, *titles[number % len(titles)])
        with sharded_orm.atomic(board):
            for photo_id in chance.sample(photos, min(len(photos), chance.randrange(4, 16))):
                pin_photo(board, photo_id, chance.choice(NOTES))
                pins += 1
    return pins
