"""The pairs of Python and Django whose short lanes run beside the whole tests.

``python tests/pairs.py`` prints a line for each pair whose interpreter is on this machine: the virtual
environment, the interpreter and what pip has to install. ``scripts/test`` makes the virtual
environments of it. This module needs nothing but the standard library, because at that time nothing
is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYENV = Path.home() / ".pyenv" / "versions"


@dataclass(frozen=True)
class Pair:
    """A version of Python with a version of Django."""

    python: str
    django: str

    @property
    def name(self) -> str:
        return f"py{self.python}-dj{self.django}".replace(".", "")

    @property
    def folder(self) -> Path:
        """The virtual environment."""
        return ROOT / f".venv-{self.name}"

    @property
    def requirement(self) -> str:
        return f"Django=={self.django}.*"

    def executable(self) -> Path | None:
        """Return the interpreter in the virtual environment; None if there is none."""
        path = self.folder / "bin" / "python"
        return path if path.exists() else None

    def interpreter(self) -> str | None:
        """Return an interpreter of this machine with the right version: on PATH, or of pyenv."""
        on_path = shutil.which(f"python{self.python}")
        candidates = [on_path] if on_path else []
        candidates += [str(path) for path in sorted(PYENV.glob(f"{self.python}.*/bin/python"))]
        return next(filter(self._fits, candidates), None)

    def _fits(self, path: str) -> bool:
        # A program of pyenv on PATH may say that the version is not active.
        show = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", show], capture_output=True, text=True)
        return done.stdout.strip() == self.python


#: Few that cover most: each newer Django, and the newest Python with the oldest Django. The whole
#: tests run with the interpreter that was chosen, usually Debian's Python 3.11 with Django 5.2.
PAIRS = (Pair("3.12", "6.0"), Pair("3.13", "6.1"), Pair("3.13", "5.2"))

#: Tests of each part that a version of Django may break.
ON_SQLITE = (
    "tests/docs/test_django_internals.py",
    "tests/contract",
    "tests/unit/backends",
    "tests/unit/checks",
    "tests/unit/routing",
    "tests/queries/test_cached_reads.py",
    "tests/queries/test_django_features.py",
    "tests/queries/test_generic_relations.py",
    "tests/queries/test_relations.py",
    "tests/queries/test_several_shards.py",
    "tests/queries/test_timestamped_ids.py",
    "tests/integration/fixtures",
    "tests/integration/migrate/engine/test_equality.py",
    "tests/integration/migrate/engine/test_features.py",
    "tests/integration/scatter/test_behaviour.py",
    "tests/integration/subqueries/test_rules.py",
    "tests/admin/test_actions.py",
    "tests/admin/test_changelist.py",
    "tests/admin/test_deleting.py",
    "tests/admin/test_list_editing.py",
    "tests/admin/test_outages.py",
)
ON_MARIADB = (
    "tests/unit/backends",
    "tests/queries/test_cached_transactions.py",
    "tests/queries/test_django_features.py",
    "tests/queries/test_invalidation.py",
    "tests/queries/test_one_shard.py",
    "tests/queries/test_packed_ids.py",
    "tests/queries/test_relations.py",
    "tests/integration/mysql/test_cursors.py",
    "tests/integration/mysql/test_transactions.py",
    "tests/integration/scatter/test_behaviour.py",
    "tests/admin/test_changing.py",
)


def installable() -> Iterator[tuple[Pair, str]]:
    """Yield each pair whose interpreter is on this machine, with the interpreter."""
    for pair in PAIRS:
        if interpreter := pair.interpreter():
            yield pair, interpreter


if __name__ == "__main__":
    for pair, interpreter in installable():
        print(pair.folder.name, interpreter, pair.requirement, file=sys.stdout)
