"""A site whose photos have a country, which is a reference table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from tests.integration.imports import site as library_site
from tests.integration.imports.site import ROOT
from tests.integration.imports.stored_sites import set_up_once
from tests.integration.references import project
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess

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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.content["sharded_orm"]["GROUPS"]["pins"]
        if self.backend == "sqlite3":
            # A transaction that has read must not begin to write later, while others write.
            for entry in (*self.nodes.values(), self.content["databases"]["default"]):
                entry["OPTIONS"]["transaction_mode"] = "IMMEDIATE"
        self.save()

    def prepare(self) -> None:
        self.create_databases()
        for alias in ("default", "directory"):
            self.manage("migrate", "--database", alias, "--verbosity", "0")
        self.manage("tickets", "create")
        self.manage("migrate_shards", "--create", "--verbosity", "0")
        self.run(
            'runtime.strategy("books").store.place("books", {str(n): n % 4 for n in range(1, 9)})'
        )

    def start(self, *arguments: str, **environment: str) -> PythonProcess:
        return PythonProcess(
            ["-m", "tests.integration.references.project", str(self._settings_file), *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=PIPE,
            prepared=prepared_by(project.prepare),
        )

    def run(self, code: str, **environment: str) -> str:
        """Run code in a process of the site, and return what it prints."""
        done = self.python("run", PREAMBLE + code, **environment)
        assert done.code == 0, done.err
        return done.out.strip()


@contextmanager
def site_on(backend: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Site]:
    with library_site.site_on(backend, request, folder, Site) as site:
        assert isinstance(site, Site)
        set_up_once(site, site.prepare)
        yield site
