"""A site with two stores of entities, and the processes that write and clean them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.integration.entities import project
from tests.integration.imports import site as library_site
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import logging
logging.getLogger("sharded_orm").addHandler(logging.NullHandler())
import datetime, random, uuid
from django.db import connections, transaction
import sharded_orm
from sharded_orm import runtime
from sharded_orm.contrib.entities import Entity
from sharded_orm.contrib.entities.exceptions import *
from tests.integration.entities.feeds.models import *

def moment(number):
    return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=number)

def entry(user=1, link="a", at=0, **more):
    return Entity(user_id=user, link=link, published=moment(at), **more)

def titles(entities):
    return [e.get("title") for e in entities]

def every(index, limit=3, **properties):
    # All pages of a query, one after the other.
    entities, after = [], None
    while True:
        page = index.get_all(limit=limit, after=after, **properties)
        entities += page
        after = page.after
        if after is None:
            return entities

def marks():
    return sum(s.model.objects.scatter().filter(marked_at__isnull=False).count() for s in (feed, posts))

def differences():
    # Compares entities and index rows by hand, without the code under test.
    import json, zlib
    found = []
    for store in (feed, posts):
        bodies = store.model.objects.scatter().exclude(body=b"").values_list("id", "body")
        entities = {id: json.loads(zlib.decompress(body)) for id, body in bodies}
        for index in store.indexes:
            wanted = {
                (*(str(e[n]).replace("T", " ") for n in index.names), id)
                for id, e in entities.items()
                if None not in [e.get(n) for n in index.names]
            }
            rows = index.model.objects.scatter().values_list(*index.names, "entity_id")
            there = {(*map(str, row[:-1]), row[-1]) for row in rows}
            found += [(index.name, "missing", row) for row in wanted - there]
            found += [(index.name, "stale", row) for row in there - wanted]
    return found
"""


class Site(library_site.Site):
    """Groups ``books`` (directory) and ``accounts`` (modulo) have four shards on two nodes."""

    project = project
    preamble = PREAMBLE
    first_rows = (
        "from sharded_orm.contrib.entities import index_states\n"
        "for index in (*feed.indexes, *posts.indexes): index_states.set_state(index, 'served')"
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.content["sharded_orm"]["PLACEMENT_LEASE"] = 0.4
        self.lock_early()
        self.save()

    def wait_for(self, path: Path, processes: list[PythonProcess]) -> None:
        """Wait until one of the processes has created the file."""
        until = time.monotonic() + PATIENCE
        while not path.exists():
            assert time.monotonic() < until and all(p.poll() is None for p in processes)
            time.sleep(0.02)

    def kill_at(self, moment: str, code: str) -> library_site.Done:
        """Run code in a process that kills itself at that moment."""
        return self.python("run", PREAMBLE + code, KILL_AT=moment)
