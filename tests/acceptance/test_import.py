"""MovieLens: ratings come from one table into sixteen shards while the site goes on writing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.movielens_data import Data
from tests.acceptance.project import BACKENDS, ROOT, Project, project_on
from tests.acceptance.test_movielens import prepare
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

MODELS = ["movielens.Rating", "movielens.Tag"]
_LOAD = """
import csv, datetime, pathlib
from decimal import Decimal
from django.db import connections, models
from testproject.movielens.models import Movie, Rating, Tag

folder = pathlib.Path({folder!r})
def rows(name):
    with (folder / name).open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream)
def moment(row):
    return datetime.datetime.fromtimestamp(int(row["timestamp"]), datetime.UTC)
def old(model):
    return models.QuerySet(model, using="default")
def ratings():
    for number, row in enumerate(rows("ratings.csv"), 1):
        yield Rating(rating_id=number, user_id=int(row["userId"]), movie_id=int(row["movieId"]),
                     stars=Decimal(row["rating"]), rated_at=moment(row))
"""
_TABLES = """
with connections["default"].schema_editor() as editor:
    editor.create_model(Rating)
    editor.create_model(Tag)
Movie.objects.bulk_create(
    Movie(movie_id=int(row["movieId"]), title=row["title"], genres=row["genres"])
    for row in rows("movies.csv")
)
old(Tag).bulk_create(
    [Tag(tag_id=number, user_id=int(row["userId"]), movie_id=int(row["movieId"]), text=row["tag"],
         tagged_at=moment(row)) for number, row in enumerate(rows("tags.csv"), 1)],
    batch_size=500,
)
every = list(ratings())
old(Rating).bulk_create(every[: len(every) * 3 // 4], batch_size=500)
"""
_WRITE = """
every = list(ratings())
rest = every[len(every) * 3 // 4 :]
for start in range(0, len(rest), 20):
    old(Rating).bulk_create(rest[start : start + 20])
    if start == 100:
        print("begun", flush=True)
print(len(rest))
"""
_TOTALS = """
from sharded_orm import runtime
shards = [Rating.objects.using(s.alias).count() for s in runtime.group("ratings").shards()]
print(len(every := list(ratings())), sum(shards), len([n for n in shards if n]))
"""


@pytest.fixture(params=BACKENDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    with project_on(request.param, request, tmp_path) as project:
        prepare(project)
        yield project


def shell(project: Project, data: Data, code: str) -> list[str]:
    return ["shell", "--no-imports", "-c", _LOAD.format(folder=str(data.folder)) + code]


# On SQLite, the processes only wait for each other.
@pytest.mark.long_on("sqlite")
def test_ratings_come_into_sixteen_shards_while_the_site_writes(
    site: Project, data: Data, say: Callable[[str], None]
) -> None:
    site.manage(*shell(site, data, _TABLES))
    manage = str(ROOT / "manage.py")
    writer = PythonProcess([manage, *shell(site, data, _WRITE)], cwd=ROOT, env=site.environment)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    farm = [
        PythonProcess(
            [manage, "shards", "import", *MODELS, "--from", "default", "--rows", "2000",
             "--rounds", "50", "-v", "0", "--json"],
            cwd=ROOT,
            env=site.environment,
        )
        for _ in range(2)
    ]  # fmt: skip
    written, errors = writer.communicate(timeout=PATIENCE)
    assert writer.returncode == 0, errors
    for process in farm:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors

    def result(*options: str) -> Any:
        output = site.manage("shards", "import", *MODELS, "--from", "default", "--json", *options)
        return json.loads(output[output.index("{") : output.rindex("}") + 1])

    last = result()
    assert last["ok"], last
    compared = result("--verify")
    assert compared["ok"], compared
    expected, stored, shards = map(int, site.manage(*shell(site, data, _TOTALS)).split())
    assert stored == expected
    assert compared["tables"]["movielens.Rating"]["rows"] == expected
    assert shards > 8
    site.manage("tickets", "verify")
    assert re.match(r"\d+", written)
    say(f"{site.backend}: {expected} ratings imported, {written.strip()} of them written meanwhile")
