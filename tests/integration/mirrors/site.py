"""A site whose notes have mirrors, and the processes that write and relay them."""

from __future__ import annotations

from typing import Any

from tests.integration.imports import site as library_site
from tests.integration.mirrors import project

#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import logging
logging.getLogger("sharded_orm").addHandler(logging.NullHandler())
from django.db import connections, transaction
from django.db.models import F, Q, QuerySet
import sharded_orm
from sharded_orm import runtime
from sharded_orm.contrib.mirrors.exceptions import *
from sharded_orm.contrib.mirrors.models import OutboxRow, RowVersion
from tests.integration.mirrors.notes.models import *

def aliases(group):
    return [shard.alias for shard in runtime.group(group).shards()]

def rows(model, *names):
    return sorted(model.objects.uncached().scatter().values_list(*names))

def outbox():
    return sum(QuerySet(OutboxRow, using=a).count() for a in aliases("books") + aliases("accounts"))

def note(owner=1, author=2, text="text", **values):
    return Note.objects.create(owner_id=owner, author_id=author, text=text, **values)

def differences():
    # Compares both sides by hand, without the code under test.
    found = []
    for mirror, source, key in ((WrittenNote, Note, "author_id"), (PublicNote, Note, "note_id"), (TopicOfNote, NoteTopic, "topic_id")):
        names = [f.attname for f in mirror._meta.concrete_fields]
        originals = source.objects.uncached().scatter().exclude(**{f"{key}__isnull": True})
        if mirror is PublicNote:
            originals = originals.filter(is_public=True)
        there = sorted(mirror.objects.uncached().scatter().values_list(*names))
        wanted = sorted(originals.values_list(*names))
        if there != wanted:
            found.append((mirror.__name__, sorted(set(there) ^ set(wanted)), len(there), len(wanted)))
    return found
"""


class Site(library_site.Site):
    """Groups ``books`` (directory) and ``accounts`` (modulo) have four shards on two nodes."""

    project = project
    preamble = PREAMBLE
    first_rows = (
        'runtime.strategy("books").store.place("books", {str(n): n % 4 for n in range(1, 9)})'
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.content["sharded_orm"]["PLACEMENT_LEASE"] = 0.4
        self.lock_early()
        self.save()
