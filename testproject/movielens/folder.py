"""Reads and checks a MovieLens folder. Uses no database."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path

LAST_ID = 2**63 - 1
LONGEST = 255
COLUMNS = {
    "movies": ("movieId", "title", "genres"),
    "ratings": ("userId", "movieId", "rating", "timestamp"),
    "tags": ("userId", "movieId", "tag", "timestamp"),
}


class FolderError(Exception):
    """The folder, or a line of a file in it, is malformed. The message names place and reason."""


@dataclass(frozen=True)
class MovieRow:
    movie_id: int
    title: str
    genres: str


@dataclass(frozen=True)
class RatingRow:
    user_id: int
    movie_id: int
    stars: Decimal
    rated_at: datetime


@dataclass(frozen=True)
class TagRow:
    user_id: int
    movie_id: int
    text: str
    tagged_at: datetime


@dataclass
class Contents:
    """The counts of :func:`check`: rows per file, and the users of two of them."""

    rows: dict[str, int] = field(default_factory=dict)
    raters: set[int] = field(default_factory=set)
    taggers: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        return sum(self.rows.values())


def check(folder: Path) -> Contents:
    """Read every line once, so that a bad one is found before any row is stored.

    :raises FolderError: a file is missing or malformed.
    """
    contents = Contents()
    movies: set[int] = set()
    for row in read_movies(folder):
        if row.movie_id in movies:
            raise FolderError(f"movies.csv: the movie {row.movie_id} is there twice")
        movies.add(row.movie_id)
    contents.rows["movies"] = len(movies)
    contents.rows["ratings"] = 0
    user, rated = 0, set[int]()
    for rating in read_ratings(folder):
        _known("ratings.csv", rating.movie_id, movies)
        if rating.user_id != user:
            # The file is ordered by user, so only the films of one user must be remembered.
            user, rated = rating.user_id, set()
        if rating.movie_id in rated:
            raise FolderError(f"ratings.csv: user {user} rates the movie {rating.movie_id} twice")
        rated.add(rating.movie_id)
        contents.raters.add(user)
        contents.rows["ratings"] += 1
    contents.rows["tags"] = 0
    for tag in read_tags(folder):
        _known("tags.csv", tag.movie_id, movies)
        contents.taggers.add(tag.user_id)
        contents.rows["tags"] += 1
    return contents


def read_movies(folder: Path) -> Iterator[MovieRow]:
    for line, (movie_id, title, genres) in _lines(folder, "movies"):
        yield MovieRow(
            line.id("movieId", movie_id), line.text("title", title), line.text("genres", genres)
        )


def read_ratings(folder: Path) -> Iterator[RatingRow]:
    for line, (user_id, movie_id, stars, timestamp) in _lines(folder, "ratings"):
        yield RatingRow(
            line.id("userId", user_id),
            line.id("movieId", movie_id),
            line.stars(stars),
            line.time(timestamp),
        )


def read_tags(folder: Path) -> Iterator[TagRow]:
    for line, (user_id, movie_id, text, timestamp) in _lines(folder, "tags"):
        yield TagRow(
            line.id("userId", user_id),
            line.id("movieId", movie_id),
            line.text("tag", text),
            line.time(timestamp),
        )


@dataclass(frozen=True)
class _Line:
    """The current line, for messages; converts the fields of the line."""

    file: str
    number: int

    def wrong(self, problem: str) -> FolderError:
        return FolderError(f"{self.file}, line {self.number}: {problem}")

    def id(self, column: str, value: str) -> int:
        # int() alone would take "1_000" and " 7 ".
        if not (value.isascii() and value.isdigit()) or not 0 < int(value) <= LAST_ID:
            raise self.wrong(f"{column} {value!r} is no positive 64-bit number")
        return int(value)

    def text(self, column: str, value: str) -> str:
        if not value or len(value) > LONGEST:
            raise self.wrong(f"{column} must have 1 to {LONGEST} characters, not {len(value)}")
        return value

    def stars(self, value: str) -> Decimal:
        try:
            stars = Decimal(value)
        except InvalidOperation:
            stars = Decimal("NaN")
        if not stars.is_finite() or not 0 < stars <= 5 or stars * 2 % 1:
            raise self.wrong(f"rating {value!r} is not 0.5, 1.0 … 5.0")
        return stars

    def time(self, value: str) -> datetime:
        try:
            return datetime.fromtimestamp(int(value), UTC)
        except (ValueError, OverflowError, OSError) as exc:
            raise self.wrong(f"timestamp {value!r} is not in seconds since 1970") from exc


def _lines(folder: Path, name: str) -> Iterator[tuple[_Line, list[str]]]:
    """Yield the fields of each line of ``name``.csv, and the line for messages."""
    file, columns = f"{name}.csv", COLUMNS[name]
    if not folder.is_dir():
        raise FolderError(f"there is no folder {str(folder)!r}")
    try:
        with (folder / file).open(encoding="utf-8", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            try:
                header = next(reader, None)
                if header != list(columns):
                    raise FolderError(
                        f"{file}, line 1: the columns must be {','.join(columns)}, not"
                        f" {','.join(header or ['(an empty file)'])}"
                    )
                for fields in reader:
                    line = _Line(file, reader.line_num)
                    if len(fields) != len(columns):
                        raise line.wrong(f"{len(fields)} fields instead of {len(columns)}")
                    yield line, fields
            except csv.Error as exc:
                raise FolderError(f"{file}, line {reader.line_num}: {exc}") from exc
            except UnicodeDecodeError as exc:
                raise FolderError(
                    f"{file}, after line {reader.line_num}: not UTF-8 ({exc.reason})"
                ) from exc
    except FileNotFoundError as exc:
        raise FolderError(f"{file} is missing in {str(folder)!r}") from exc
    except OSError as exc:
        raise FolderError(f"{file} cannot be read: {exc.strerror}") from exc


def _known(file: str, movie_id: int, movies: set[int]) -> None:
    if movie_id not in movies:
        raise FolderError(f"{file}: the movie {movie_id} is not in movies.csv")
