"""Loads a MovieLens folder into the database in batches, by the public API of the library."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from testproject.movielens.folder import read_movies, read_ratings, read_tags
from testproject.movielens.models import Movie, Rating, Tag

#: Rows per call of ``bulk_create``, which spreads them over the shards.
BATCH = 5000


@dataclass(frozen=True)
class Loaded:
    """Number of rows that :func:`load` stored of one file, and the seconds it took."""

    name: str
    rows: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


def is_empty() -> bool:
    """Whether no shard and no table has any rows yet."""
    return not (
        Movie.objects.exists()
        or Rating.objects.scatter().exists()
        or Tag.objects.scatter().exists()
    )


def clear() -> None:
    """Delete all films, ratings and tags."""
    # First the rows that refer to films: an interrupted clear() leaves films, and the next load
    # refuses to run on them.
    Rating.objects.scatter().delete()
    Tag.objects.scatter().delete()
    Movie.objects.all().delete()


def load(folder: Path, progress: Callable[[int], None]) -> Iterator[Loaded]:
    """Store the three files, one after the other. Not atomic, see :func:`clear`.

    :param progress: called with the number of rows of each batch.
    """
    movies = (
        Movie(movie_id=row.movie_id, title=row.title, genres=row.genres)
        for row in read_movies(folder)
    )
    ratings = (
        Rating(user_id=r.user_id, movie_id=r.movie_id, stars=r.stars, rated_at=r.rated_at)
        for r in read_ratings(folder)
    )
    tags = (
        Tag(user_id=r.user_id, movie_id=r.movie_id, text=r.text, tagged_at=r.tagged_at)
        for r in read_tags(folder)
    )
    yield _store("movies", Movie, movies, progress)
    yield _store("ratings", Rating, ratings, progress)
    yield _store("tags", Tag, tags, progress)


def _store(name: str, model: Any, rows: Iterable[Any], progress: Callable[[int], None]) -> Loaded:
    began = time.perf_counter()
    stored = 0
    rows = iter(rows)
    while batch := list(islice(rows, BATCH)):
        model.objects.bulk_create(batch)
        stored += len(batch)
        progress(len(batch))
    return Loaded(name, stored, time.perf_counter() - began)
