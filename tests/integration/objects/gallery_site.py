"""A site of objects with mirrors, and processes that write at the same time."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.integration.imports import site as library_site
from tests.integration.objects import project
from tests.patience import PATIENCE

#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import json, sys
from django.db import DatabaseError, OperationalError, connections
from sharded_orm.contrib.objects.exceptions import *
from tests.integration.objects.gallery.models import *
"""


class GallerySite(library_site.Site):
    """Groups ``pins`` (embedded) and ``accounts`` (modulo) have four shards on two nodes."""

    project = project
    preamble = PREAMBLE
    first_rows = ""

    def run(self, code: str, **environment: str) -> Any:
        """Run code in a process of the site, and return the JSON that it prints."""
        return json.loads(super().run(code, **environment) or "null")

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
