"""The MovieLens folder for the tests: the real one, or a generated one of the same shape."""

from __future__ import annotations

import csv
import os
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "MOVIELENS_DIR"
DEFAULT = ROOT.parent / "shared" / "data" / "movielens"
SEED = 20180926

# Sizes of ml-latest-small; they correspond to a scale of 1.
USERS, MOVIES, RATINGS, TAGS = 610, 9742, 100_836, 3683
BUSIEST = 414


@dataclass(frozen=True)
class Data:
    """A MovieLens folder, and a description of its origin for people."""

    folder: Path
    origin: str


def find_or_make(folder: Path, scale: float = 0.2) -> Data:
    """Return the folder of ``$MOVIELENS_DIR``, else the default folder, else a generated one."""
    named = os.environ.get(VARIABLE)
    real = Path(named) if named else DEFAULT
    if named or real.is_dir():
        return Data(real, f"the folder in ${VARIABLE}" if named else "the real MovieLens data")
    make(folder, scale)
    return Data(folder, f"generated data, {scale:.0%} of MovieLens, as ${VARIABLE} is not set")


def excerpt(data: Data, folder: Path, every: int) -> Data:
    """Copy the films of ``data``, and what every so many-th user rated and tagged, to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(data.folder / "movies.csv", folder)
    for name in ("ratings", "tags"):
        with (data.folder / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
            header, *rows = csv.reader(stream)
        user = header.index("userId")
        _write(
            folder, name, header, [row for row in rows if int(row[user]) % every == BUSIEST % every]
        )
    return Data(folder, f"a part of {data.origin}: one user in {every}")


def make(folder: Path, scale: float) -> None:
    """Write the three files: few users with very many ratings, few films with most of them."""
    chance = random.Random(SEED)
    others = [user for user in range(1, USERS + 1) if user != BUSIEST]
    users = [BUSIEST, *chance.sample(others, max(3, round(USERS * scale)) - 1)]
    movies = sorted(chance.sample(range(1, 193_610), max(50, round(MOVIES * scale))))
    weights = [1 / (place + 5) for place in range(len(movies))]
    popular = chance.sample(movies, len(movies))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, "movies", ["movieId", "title", "genres"], (
        [m, _title(chance, m), "|".join(chance.sample(_GENRES, chance.randrange(1, 4)))]
        for m in movies
    ))  # fmt: skip
    shares = [1 / (place + 3) for place in range(len(users))]
    total = round(RATINGS * scale)
    ratings: set[tuple[int, int]] = set()
    for user, share in zip(users, shares, strict=True):
        count = min(len(movies) // 2, max(20, round(total * share / sum(shares))))
        mine: set[int] = set()
        while len(mine) < count:
            mine.update(chance.choices(popular, weights, k=count - len(mine)))
        ratings.update((user, movie) for movie in mine)
    _write(folder, "ratings", ["userId", "movieId", "rating", "timestamp"], (
        [user, movie, chance.choice(_STARS), _timestamp(chance)] for user, movie in sorted(ratings)
    ))  # fmt: skip
    tagged = chance.sample(sorted(ratings), round(TAGS * scale))
    _write(folder, "tags", ["userId", "movieId", "tag", "timestamp"], (
        [user, movie, chance.choice(_TAGS), _timestamp(chance)] for user, movie in sorted(tagged)
    ))  # fmt: skip


_GENRES = ["Action", "Comedy", "Drama", "Film-Noir", "Sci-Fi", "Thriller", "Western"]
_STARS = ["0.5", "1.0", "1.5", "2.0", "2.5", "3.0", "3.5", "4.0", "4.0", "4.5", "5.0"]
_WORDS = ["Night", "Misérables, Les", 'The "Long" Way', "Return", "Über", "Summer, A", "Iron"]
_TAGS = [
    "funny", "Funny", "will ferrell", "Highly quotable", "atmospheric", "Shakespeare, of a sort",
    "\"quoted\"", "déjà vu", "deja vu", "Oscar (Best Picture)", "based on a book", "sci-fi",
]  # fmt: skip


def _title(chance: random.Random, movie: int) -> str:
    return f"{chance.choice(_WORDS)} {movie} ({chance.randrange(1920, 2019)})"


def _timestamp(chance: random.Random) -> int:
    return chance.randrange(828_124_615, 1_537_799_250)


def _write(folder: Path, name: str, header: list[str], rows: Iterable[list[object]]) -> None:
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)
