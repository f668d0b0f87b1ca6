"""Sixteen shards compared with one plain table with the same rows.

Runs on the real databases of a project into which ``import_movielens`` has loaded
``$MOVIELENS_DIR``, not on test databases: the rows that the command stored are under test.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, models
from django.db.models import Avg, Count, Max, Min, Q, Sum

from sharded_orm import runtime
from sharded_orm.exceptions import ScatterNotSupported
from testproject.movielens.folder import RatingRow, TagRow, check, read_ratings, read_tags
from testproject.movielens.models import Movie, Rating, Tag

FOLDER = Path(os.environ["MOVIELENS_DIR"])
#: The user with the most ratings in the published data.
USER = 414

pytestmark = pytest.mark.django_db(databases=["default", "ratings"])


class PlainRating(models.Model):
    user_id = models.BigIntegerField(db_index=True)
    movie_id = models.BigIntegerField(db_index=True)
    stars = models.DecimalField(max_digits=2, decimal_places=1)
    rated_at = models.DateTimeField()

    class Meta:
        app_label = "movielens"
        db_table = "plain_rating"


class PlainTag(models.Model):
    user_id = models.BigIntegerField(db_index=True)
    movie_id = models.BigIntegerField()
    text = models.CharField(max_length=255)
    tagged_at = models.DateTimeField()

    class Meta:
        app_label = "movielens"
        db_table = "plain_tag"


@pytest.fixture(scope="session")
def django_db_setup(django_db_blocker: Any) -> Iterator[None]:
    """Create the plain tables beside the real ones, and drop them; no test databases."""
    with django_db_blocker.unblock():
        with connection.schema_editor() as editor:
            editor.create_model(PlainRating)
            editor.create_model(PlainTag)
        PlainRating.objects.bulk_create(
            [
                PlainRating(
                    user_id=r.user_id, movie_id=r.movie_id, stars=r.stars, rated_at=r.rated_at
                )
                for r in read_ratings(FOLDER)
            ],
            batch_size=5000,
        )
        PlainTag.objects.bulk_create(
            [
                PlainTag(user_id=t.user_id, movie_id=t.movie_id, text=t.text, tagged_at=t.tagged_at)
                for t in read_tags(FOLDER)
            ],
            batch_size=5000,
        )
    yield
    with django_db_blocker.unblock(), connection.schema_editor() as editor:
        editor.delete_model(PlainRating)
        editor.delete_model(PlainTag)


@pytest.fixture(scope="session")
def ratings() -> list[RatingRow]:
    return list(read_ratings(FOLDER))


@pytest.fixture(scope="session")
def tags() -> list[TagRow]:
    return list(read_tags(FOLDER))


@pytest.fixture(scope="session")
def users(ratings: list[RatingRow]) -> list[int]:
    """All users, most ratings first."""
    return [user for user, _ in Counter(r.user_id for r in ratings).most_common()]


# -- The shards of the rows --------------------------------------------------------------


@pytest.mark.parametrize("model", [Rating, Tag])
def test_every_row_is_on_the_shard_of_its_key(
    model: Any, ratings: list[RatingRow], tags: list[TagRow]
) -> None:
    expected = Counter(row.user_id for row in (ratings if model is Rating else tags))
    found: Counter[int] = Counter()
    ids: set[int] = set()
    for shard in runtime.group("ratings").shards():
        for user, pk in model.objects.using(shard.alias).values_list("user_id", "pk"):
            # The strategy's formula, written down independently on purpose (I4).
            assert user % 16 == shard.number, (user, shard)
            found[user] += 1
            ids.add(pk)
    assert found == expected
    assert len(ids) == expected.total()


def test_films_are_in_the_global_database() -> None:
    assert Movie.objects.count() == check(FOLDER).rows["movies"]
    assert {movie._state.db for movie in Movie.objects.all()[:10]} == {"default"}


# -- Against the plain table ---------------------------------------------------------------

NAMES = ("user_id", "movie_id", "stars", "rated_at")
Question = Callable[[Any], Any]

QUESTIONS: dict[str, Question] = {
    "count": lambda rows: rows.count(),
    "exists": lambda rows: (rows.filter(stars=5).exists(), rows.filter(stars__gt=5).exists()),
    "top 20 films by count": lambda rows: list(
        rows.values("movie_id").annotate(n=Count("stars")).order_by("-n", "movie_id")[:20]
    ),
    "mean rating of each film": lambda rows: list(
        rows.values_list("movie_id")
        .annotate(mean=Avg("stars"), n=Count("stars"))
        .order_by("movie_id")
    ),
    "users with many ratings": lambda rows: list(
        # The rows of a user are on one shard, so the shard can answer HAVING.
        rows.values("user_id")
        .annotate(mean=Avg("stars"), n=Count("stars"))
        .filter(n__gte=100)
        .order_by("-mean", "user_id")
    ),
    "histogram of stars": lambda rows: list(
        rows.values_list("stars").annotate(Count("movie_id")).order_by("stars")
    ),
    "distinct stars": lambda rows: list(
        rows.values_list("stars", flat=True).distinct().order_by("stars")
    ),
    "all aggregates": lambda rows: rows.aggregate(
        Count("stars"), Sum("stars"), Avg("stars"), Min("rated_at"), Max("rated_at"),
        films=Count("movie_id", distinct=True), users=Count("user_id", distinct=True),
    ),
    "aggregates of no rows": lambda rows: rows.filter(stars__gt=5).aggregate(
        Count("stars"), Sum("stars"), Avg("stars"), Max("rated_at")
    ),
    "aggregate with a filter": lambda rows: rows.aggregate(
        good=Count("stars", filter=Q(stars__gte=4)), mean=Avg("stars", filter=Q(movie_id__lt=500))
    ),
    "newest 50": lambda rows: list(
        rows.order_by("-rated_at", "user_id", "movie_id").values_list(*NAMES)[:50]
    ),
    "deep page": lambda rows: list(
        rows.order_by("rated_at", "user_id", "movie_id").values_list(*NAMES)[1000:1050]
    ),
    "all rows in order": lambda rows: list(
        rows.order_by("user_id", "movie_id").values_list(*NAMES)
    ),
    "one film": lambda rows: list(
        rows.filter(movie_id=1).order_by("user_id").values("user_id", "stars")
    ),
    "a year": lambda rows: rows.filter(rated_at__year=2015).count(),
    "exclude and or": lambda rows: rows.filter(Q(stars=5) | Q(stars=0.5)).exclude(movie_id__lt=300).count(),
    "first and last": lambda rows: [
        rows.order_by("rated_at", "user_id", "movie_id").values_list(*NAMES).first(),
        rows.order_by("rated_at", "user_id", "movie_id").values_list(*NAMES).last(),
    ],
    "years": lambda rows: list(rows.dates("rated_at", "year")),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_scatter_answers_as_one_table(question: str) -> None:
    ask = QUESTIONS[question]
    assert ask(Rating.objects.scatter()) == ask(PlainRating.objects.all())


@pytest.mark.parametrize("question", QUESTIONS)
def test_users_of_several_shards_answer_as_one_table(question: str, users: list[int]) -> None:
    ask, few = QUESTIONS[question], users[:7]
    assert ask(Rating.objects.filter(user_id__in=few)) == ask(
        PlainRating.objects.filter(user_id__in=few)
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_user_answers_as_one_table(question: str, users: list[int]) -> None:
    ask = QUESTIONS[question]
    for user in (users[0], users[-1], USER):
        assert ask(Rating.objects.filter(user_id=user)) == ask(
            PlainRating.objects.filter(user_id=user)
        )


def test_ratings_of_a_user_by_time(ratings: list[RatingRow], users: list[int]) -> None:
    # A copy of the data may number its users differently. Then 414 has no ratings, and the user
    # with the most ratings stands in. The answer for 414 must be right all the same.
    for user in {USER, users[0]}:
        expected = sorted((r.rated_at, r.movie_id, r.stars) for r in ratings if r.user_id == user)
        found = Rating.objects.filter(user_id=user).order_by("rated_at", "movie_id")
        assert list(found.values_list("rated_at", "movie_id", "stars")) == expected
    assert Rating.objects.filter(user_id=users[0]).count() > 100


def test_iteration_over_all_shards(users: list[int]) -> None:
    rows = Rating.objects.scatter().order_by("-stars", "user_id", "movie_id")
    plain = PlainRating.objects.order_by("-stars", "user_id", "movie_id")
    assert [(r.user_id, r.movie_id) for r in rows.iterator(chunk_size=500)] == [
        (r.user_id, r.movie_id) for r in plain.iterator(chunk_size=500)
    ]


def test_instances_know_their_shard_and_their_film() -> None:
    found = list(Rating.objects.scatter().filter(stars=5).order_by("user_id", "movie_id")[:200])
    for rating in found:
        assert rating._state.db == f"ratings_{rating.user_id % 16:05d}"
    films = Rating.objects.scatter().order_by("-rated_at", "user_id", "movie_id")
    for rating in films.prefetch_related("movie")[:50]:
        assert rating.movie.movie_id == rating.movie_id
        assert rating.movie._state.db == "default"


# -- Against the files, computed without a database ------------------------------------------


def test_top_20_films(ratings: list[RatingRow]) -> None:
    counts = Counter(r.movie_id for r in ratings)
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:20]
    found = Rating.objects.scatter().values_list("movie_id").annotate(n=Count("pk"))
    assert list(found.order_by("-n", "movie_id")[:20]) == expected


def test_mean_rating_of_each_film(ratings: list[RatingRow]) -> None:
    stars: dict[int, list[Decimal]] = defaultdict(list)
    for rating in ratings:
        stars[rating.movie_id].append(rating.stars)
    found = dict(Rating.objects.scatter().values_list("movie_id").annotate(Avg("stars")).order_by())
    assert found.keys() == stars.keys()
    for movie, mean in found.items():
        exact = sum(stars[movie]) / len(stars[movie])
        # The number of digits of a mean depends on the database.
        assert abs(Decimal(mean) - exact) < Decimal("0.00001"), movie


def test_condition_on_groups_of_several_shards_is_refused() -> None:
    counted = Rating.objects.scatter().values("movie_id").annotate(n=Count("stars"))
    with pytest.raises(ScatterNotSupported, match="groups that span shards"):
        list(counted.filter(n__gte=20))


# -- Tags: text, which the database compares in its own way -----------------------------------


def test_distinct_tags() -> None:
    sharded, plain = (
        list(rows.values_list("text", flat=True).distinct().order_by("text"))
        for rows in (Tag.objects.scatter(), PlainTag.objects.all())
    )
    # If the collation treats "Funny" and "funny" as equal, either may stand for both.
    assert len(sharded) == len(plain)
    assert sorted(map(str.casefold, sharded)) == sorted(map(str.casefold, plain))


TAG_QUESTIONS: dict[str, Question] = {
    "count": lambda rows: rows.count(),
    "distinct texts": lambda rows: rows.aggregate(n=Count("text", distinct=True)),
    "text": lambda rows: list(
        rows.filter(text="funny").order_by("user_id", "movie_id").values_list("user_id", "movie_id")
    ),
    "contains": lambda rows: rows.filter(text__icontains="based on").count(),
    "in order of text": lambda rows: list(
        rows.order_by("text", "user_id", "movie_id", "tagged_at").values_list("user_id", "movie_id")
    ),
    "most tags": lambda rows: list(
        rows.values_list("user_id").annotate(n=Count("text")).order_by("-n", "user_id")
    ),
}


@pytest.mark.parametrize("question", TAG_QUESTIONS)
def test_tags_answer_as_one_table(question: str) -> None:
    ask = TAG_QUESTIONS[question]
    assert ask(Tag.objects.scatter()) == ask(PlainTag.objects.all())
