from __future__ import annotations

import pytest

from sharded_orm import runtime
from tests.photos.models import Album, Comment, Photo
from tests.queries.moves.hand_move import SOURCE, HandMove

KEY = 9001


@pytest.fixture
def move(transactional_db: None) -> HandMove:
    """A key with an album, a photo in it and a comment, on the shard SOURCE, and its move."""
    strategy = runtime.strategy("photos")
    strategy.forget()  # type: ignore[attr-defined]
    # A test may have turned the clock of the lease.
    runtime.placement_lease()._poll = None
    strategy.store.place("photos", {str(KEY): SOURCE})  # type: ignore[attr-defined]
    album = Album.objects.create(owner_id=KEY, title="a")
    photo = Photo.objects.create(user_id=KEY, album=album, title="p", stars=1)
    Comment.objects.create(user_id=KEY, photo=photo, text="c")
    return HandMove(
        KEY,
        {
            Album._meta.db_table: "owner_id",
            Photo._meta.db_table: "user_id",
            Comment._meta.db_table: "user_id",
        },
    )
