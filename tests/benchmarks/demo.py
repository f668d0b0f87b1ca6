"""Pages of the example site: the processor time of all their reads with plans, and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds, summary_of_both
from tests.services.memcached import MemcachedServer

#: The share of the processor time without plans that a page may take.
LIMIT = 0.6
CALLS = 20
_ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, time
import django
django.setup()
from django.core.paginator import Page
from django.db.models import QuerySet
from django.test import RequestFactory
from sharded_orm import cache_scope, runtime
from sharded_orm.cache.reader import Reader
from sharded_orm.models.cached import queryset
from sharded_orm.models.querysets.plans import without_plans
from testproject.photos import views
from testproject.photos.installation import prepare
from testproject.photos.models import Photo

for step in prepare():
    pass

def read(request, template, context):
    # As a template does: read what the view has put into the context.
    for value in context.values():
        if isinstance(value, Page):
            value.paginator.num_pages, list(value)
        elif isinstance(value, QuerySet):
            list(value)

views.render = read
photo = Photo.objects.scatter().order_by("photo_id").first()
name = photo.owner.username
request = RequestFactory().get("/")
pages = {
    "photo": lambda: views.photo(request, name, photo.pk),
    "user": lambda: views.user(request, name),
    "album": lambda: views.album(request, name, photo.album_id),
}

ahead = 0
queryset._reader = Reader(runtime.cache(), lambda: time.time() + ahead)
# Nothing is stored while a guard is young. So make the guards first.
for view in pages.values():
    view()
ahead = 60

def seconds(view):
    began, processor = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        with cache_scope():
            view()
    return (time.perf_counter() - began) / CALLS, (time.process_time() - processor) / CALLS

def off(view):
    with without_plans():
        return seconds(view)

result = {}
for page, view in pages.items():
    seconds(view), off(view)
    result[page] = [(seconds(view), off(view)) for _ in range(ROUNDS)]
print(json.dumps(result))
"""


def pages(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Read three pages of the site again and again, with memcached. Templates are left out."""
    with MemcachedServer() as cache, TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            "SHARDED_ORM_DEMO_DIR": folder,
            "SHARDED_ORM_DEMO_MYSQL": json.dumps([asdict(site.address)]),
            "SHARDED_ORM_DEMO_PREFIX": f"{new_prefix()}_",
            "SHARDED_ORM_DEMO_MEMCACHED": cache.django()["LOCATION"],
        }
        program = f"CALLS, ROUNDS = {CALLS}, {rounds.count}\n{_PROGRAM}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=environment, cwd=_ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        yield Line("pages of the demo", "plans off", f"did not run: {done.stderr.splitlines()[-1]}")
        return
    result: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    for page, pairs in result.items():
        yield at_most(
            LIMIT,
            f"page {page!r} of the demo",
            "plans off",
            summary_of_both(pairs),
            of_cpu=True,
        )
