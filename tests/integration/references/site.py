"""A site whose photos have a country, which is a reference table."""

from __future__ import annotations

from typing import Any

from tests.integration.imports import site as library_site
from tests.integration.references import project

#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import logging
logging.getLogger("sharded_orm").addHandler(logging.NullHandler())
from django.db import IntegrityError, connections, transaction
from django.db.models import *
from django.db.models.deletion import ProtectedError
import sharded_orm
from sharded_orm import runtime
from sharded_orm.contrib.mirrors.exceptions import *
from sharded_orm.contrib.references.exceptions import *
from sharded_orm.contrib.references.models import ChangedRow, TableVersion
from sharded_orm.exceptions import *
from tests.integration.references.geo.models import *

GROUPS = ("accounts", "books")
ALIASES = [shard.alias for group in GROUPS for shard in runtime.group(group).shards()]

def copies(model, alias):
    names = [f.attname for f in model._meta.concrete_fields]
    return sorted(map(repr, QuerySet(model, using=alias).order_by().values_list(*names)))

def differences(aliases=ALIASES):
    # Compares by hand, without the code under test.
    return [
        (model.__name__, alias)
        for model in (Continent, Country, City, Visa)
        for alias in aliases
        if copies(model, alias) != copies(model, "default")
    ]

def refused(exception, action):
    try:
        action()
    except exception as exc:
        return type(exc).__name__, str(exc)
    raise AssertionError("nothing was refused")
"""


class Site(library_site.Site):
    """Groups ``books`` (directory) and ``accounts`` (modulo) have four shards each on two nodes."""

    project = project
    preamble = PREAMBLE
    first_rows = (
        'runtime.strategy("books").store.place("books", {str(n): n % 4 for n in range(1, 9)})'
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.content["sharded_orm"]["GROUPS"]["pins"]
        self.lock_early("default")
        self.save()
