"""The other versions whose short lanes run beside the whole tests: pairs of Python and Django, and the
lowest versions that ``setup.cfg`` allows.

``python tests/pairs.py`` prints a line for each virtual environment whose interpreter is on this
machine: its folder, the interpreter and what pip has to install. ``scripts/test`` makes the virtual
environments of it. ``python tests/pairs.py lowest`` installs the lowest versions where it runs, for tox.
This module needs nothing but the standard library, because at that time nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYENV = Path.home() / ".pyenv" / "versions"


@dataclass(frozen=True)
class Chosen:
    """Tests of each part that a version may break, by backend."""

    on_sqlite: Sequence[str]
    on_mariadb: Sequence[str]
    on_postgresql: Sequence[str] = ()


@dataclass(frozen=True)
class Versions:
    """Versions of Python and of packages, with the tests that are run on them.

    :param name: the end of the name of the virtual environment.
    :param python: the version of Python, such as "3.12".
    :param requirements: what pip has to install beside the project, which has no spaces.
    :param routine: the tests of each run.
    :param long: the tests of the long runs.
    """

    name: str
    python: str
    requirements: Sequence[str]
    routine: Chosen
    long: Chosen

    @property
    def folder(self) -> Path:
        """The virtual environment."""
        return ROOT / f".venv-{self.name}"

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


#: Of Django and of Python.
OF_FRAMEWORK = Chosen(
    on_sqlite=(
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
        "tests/integration/migrate/engine/test_equality.py::test_a_new_shard",
        "tests/integration/migrate/engine/test_equality.py::test_backwards[zero]",
        "tests/integration/migrate/engine/test_equality.py::test_rows",
        "tests/integration/migrate/engine/test_features.py",
        "tests/integration/scatter/test_behaviour.py",
        "tests/integration/subqueries/test_rules.py",
        "tests/admin/test_actions.py",
        "tests/admin/test_changelist.py",
        "tests/admin/test_deleting.py",
        "tests/admin/test_list_editing.py",
        "tests/admin/test_outages.py",
    ),
    on_mariadb=(
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
    ),
    on_postgresql=(
        "tests/unit/backends",
        "tests/queries/test_django_features.py",
        "tests/queries/test_one_shard.py",
        "tests/integration/migrate/engine/test_features.py",
        "tests/integration/scatter/test_behaviour.py",
    ),
)
#: For versions between those that have the whole tests or the tests above: what differs with them is a
#: signature in Django that is gone, or another plan of a migration.
BETWEEN = Chosen(
    on_sqlite=(
        "tests/docs/test_django_internals.py",
        "tests/contract/test_strategies.py",
        "tests/unit/backends/group",
        "tests/unit/routing",
        "tests/queries/test_cached_reads.py",
        "tests/queries/test_django_features.py",
        "tests/queries/test_several_shards.py",
        "tests/integration/migrate/engine/test_equality.py::test_backwards[zero]",
        "tests/integration/migrate/engine/test_features.py",
        "tests/integration/scatter/test_behaviour.py",
        "tests/admin/test_changelist.py",
        "tests/admin/test_deleting.py",
    ),
    on_mariadb=(
        "tests/queries/test_cached_transactions.py",
        "tests/queries/test_django_features.py",
        "tests/queries/test_one_shard.py",
        "tests/integration/mysql/test_cursors.py",
        "tests/integration/mysql/test_transactions.py",
        "tests/integration/scatter/test_behaviour.py",
    ),
)
#: For versions each of which has more tests with another one: what differs is how these two meet.
OF_A_MEETING = Chosen(
    on_sqlite=(
        "tests/docs/test_django_internals.py",
        "tests/unit/backends/group",
        "tests/queries/test_cached_reads.py",
        "tests/queries/test_several_shards.py",
        "tests/integration/migrate/engine/test_features.py",
    ),
    on_mariadb=(),
)
#: Of drivers and of clients.
OF_CLIENTS = Chosen(
    on_sqlite=(
        "tests/contract",
        "tests/unit/backends",
        "tests/unit/cache/stores",
        "tests/integration/cache/test_stores_memcached.py",
        "tests/integration/cache/test_stores_opening.py",
        "tests/integration/cache/test_stores_redis.py",
        "tests/integration/test_timestamps_postgresql.py",
        "tests/integration/testing_support/test_clones_postgresql.py",
        "tests/integration/tickets/postgresql/test_taking.py",
        "tests/integration/topology/test_zookeeper.py",
    ),
    on_mariadb=(
        "tests/unit/backends",
        "tests/queries/test_one_shard.py",
        "tests/integration/mysql/test_connections.py",
        "tests/integration/mysql/test_cursors.py",
        "tests/integration/mysql/test_lost_sessions.py",
        "tests/integration/mysql/test_schemas_and_packets.py",
        "tests/integration/mysql/test_transactions.py",
        "tests/integration/tickets/test_forms.py",
    ),
    on_postgresql=(
        "tests/queries/test_one_shard.py",
        "tests/integration/migrate/engine/test_schemas.py",
    ),
)


def _pair(python: str, django: str, routine: Chosen = BETWEEN) -> Versions:
    name = f"py{python}-dj{django}".replace(".", "")
    requirements = (f"Django=={django}.*",)
    return Versions(name, python, requirements, routine, OF_FRAMEWORK)


#: Few that cover most: each newer Django, and the newest Python with the oldest Django. The whole
#: tests run with the interpreter that was chosen, usually Debian's Python 3.11 with Django 5.2. The one with
#: most tests is first, because its lanes are the last ones to begin.
NEWEST = _pair("3.13", "6.1", OF_FRAMEWORK)
PAIRS = (NEWEST, _pair("3.12", "6.0"), _pair("3.13", "5.2", OF_A_MEETING))

#: Extras of those who work on the project or look at its example, not of sites.
NOT_OF_SITES = frozenset({"demo", "test", "lanes", "docs"})


def _lower_bound(requirement: str) -> str:
    """Return the name and the lowest version of a requirement as a requirement of that version.

    For example, "Django>=5.2,<6.2" becomes "Django==5.2".
    """
    matched = re.fullmatch(r"([\w.\[\]-]+)>=([\w.]+)(,.*)?", requirement)
    if matched is None:
        raise ValueError(f"{requirement!r} in setup.cfg has no lower bound: write it as name>=1.2")
    return f"{matched[1]}=={matched[2]}"


def lowest(setup: Path) -> Versions:
    """Return the lowest versions that ``setup``, a ``setup.cfg``, allows to sites."""
    config = ConfigParser()
    config.read(setup)
    extras = config["options.extras_require"]
    wanted = [config["options"]["install_requires"]]
    wanted += [extras[name] for name in extras if name not in NOT_OF_SITES]
    lines: Iterable[str] = "\n".join(wanted).split("\n")
    python = config["options"]["python_requires"].removeprefix(">=")
    packages = tuple(_lower_bound(line) for line in lines if line)
    return Versions("lowest", python, packages, OF_CLIENTS, OF_CLIENTS)


#: The oldest Python and the lowest version of each package that sites install with the project. The
#: packages of the tests are the newest.
LOWEST = lowest(ROOT / "setup.cfg")

ALL = (*PAIRS, LOWEST)


def installable() -> Iterator[tuple[Versions, str]]:
    """Yield those whose interpreter is on this machine, with the interpreter."""
    for versions in ALL:
        if interpreter := versions.interpreter():
            yield versions, interpreter


def main(arguments: list[str]) -> None:
    if arguments == ["lowest"]:
        pip = [sys.executable, "-m", "pip", "install"]
        subprocess.run([*pip, "-e", f"{ROOT}[mysql,test]", *LOWEST.requirements], check=True)
        return
    for versions, interpreter in installable():
        print(versions.folder.name, interpreter, *versions.requirements)


if __name__ == "__main__":
    main(sys.argv[1:])
