"""The labels of the suite: those that run by default, all, and in which chunks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: The labels that use a database backend.
LABELS = (
    "basic", "backends", "queries", "transactions", "transaction_hooks", "select_for_update",
    "bulk_create", "multiple_database", "aggregation", "annotations", "expressions",
    "get_or_create", "delete", "update", "prefetch_related", "migrations", "schema",
    "introspection",
)  # fmt: skip


def every_label(source: Path) -> tuple[str, ...]:
    """Return all labels of this version, as ``runtests.py`` finds them without labels, sorted."""
    # False: without those of geographic databases.
    done = subprocess.run(
        [sys.executable, "-c", "import runtests; print(*runtests.get_test_modules(False))"],
        cwd=source / "tests",
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return tuple(sorted(done.stdout.split()))


def chunks(labels: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return the labels in groups of ``size``."""
    return [tuple(labels[start : start + size]) for start in range(0, len(labels), size)]
