"""A site of objects with mirrors, and processes that write at the same time."""

from __future__ import annotations

import json
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
from tests.integration.objects import project
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess

#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import json, sys
from django.db import DatabaseError, OperationalError, connections
from sharded_orm.contrib.objects.exceptions import *
from tests.integration.objects.gallery.models import *
"""


class GallerySite(library_site.Site):
    """Groups ``pins`` (embedded) and ``accounts`` (modulo) have four shards on two nodes."""

    def prepare(self) -> None:
        self.create_databases()
        for alias in ("default", "directory"):
            self.manage("migrate", "--database", alias, "--verbosity", "0")
        self.manage("migrate_shards", "--create", "--verbosity", "0")

    def start(self, *arguments: str, **environment: str) -> PythonProcess:
        return PythonProcess(
            ["-m", "tests.integration.objects.project", str(self._settings_file), *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=PIPE,
            prepared=prepared_by(project.prepare),
        )

    def run(self, code: str) -> Any:
        """Run code in a process of the site, and return the JSON that it prints."""
        done = self.python("run", PREAMBLE + code)
        assert done.code == 0, done.err
        return json.loads(done.out or "null")

    def run_together(self, *codes: str) -> list[Any]:
        """Run codes in a process each, which begin at the same time; return the JSON that they print."""
        gates = [self.folder / f"gate_{number}" for number in range(len(codes))]
        processes = []
        for gate, code in zip(gates, codes, strict=True):
            os.mkfifo(gate)
            wait = f"open({str(gate)!r}).read()\n"
            processes.append(self.start("run", PREAMBLE + wait + code))
        # Each open() waits until the process has opened the other end.
        ends = [gate.open("w") for gate in gates]
        for end in ends:
            end.close()
        answers = []
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            answers.append(json.loads(out or "null"))
        for gate in gates:
            gate.unlink()
        return answers


@contextmanager
def gallery_on(backend: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[GallerySite]:
    with library_site.site_on(backend, request, folder, GallerySite) as site:
        assert isinstance(site, GallerySite)
        set_up_once(site, site.prepare)
        yield site
