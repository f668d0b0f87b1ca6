"""The package as its users get it: built from the checkout, installed where no checkout is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.docs.markdown import ROOT
from tests.patience import PATIENCE

# Of the checkout, but for those who work on it only.
LEFT_OUT = {".ci/run"}


@dataclass(frozen=True)
class Distributions:
    """The two files that are published."""

    sdist: Path
    wheel: Path


def checkout() -> set[str]:
    """Return the files of the checkout: those that git knows, and new ones that it does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in names.split("\0") if name and (ROOT / name).is_file()}


def build(folder: Path) -> Distributions:
    """Build both files as a release does, from a copy: a build writes into its folder.

    It uses the setuptools of the tests and needs no network.
    """
    source, target = folder / "source", folder / "dist"
    for name in checkout():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)])
    shutil.rmtree(source)
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    return Distributions(sdist, wheel)


class Installation:
    """A virtual environment that has the wheel, what it requires, and ``others``; nothing else.

    What is required is linked from the environment of the tests, so that no network is needed.
    """

    def __init__(self, folder: Path, wheel: Path, others: tuple[str, ...]) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self.packages = next((folder / "lib").glob("python*/site-packages"))
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        install = ["install", "--no-index", "--no-deps", str(wheel)]
        _run([*pip, "--python", str(self.python), *install])
        (own,) = metadata.distributions(name="sharded-orm", path=[str(self.packages)])
        for name in _closure([*_required(own), *others]):
            self._link(metadata.distribution(name))

    def _link(self, distribution: metadata.Distribution) -> None:
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            target = self.packages / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))))

    def run(
        self, arguments: list[str], folder: Path, given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python there; standard output and error are one text."""
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=folder,
            env={
                **_environment(),
                "PYTHONDONTWRITEBYTECODE": "1",
                # Both streams go into one pipe and must keep their order, as in a terminal.
                "PYTHONUNBUFFERED": "1",
            },
            input=given,
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
        )


def _environment() -> dict[str, str]:
    """Return the environment without what would show the checkout, or the settings of the tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTHON"))}


def _required(distribution: metadata.Distribution) -> Iterator[str]:
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _closure(names: list[str]) -> set[str]:
    """Return ``names`` and all that these require, directly or not."""
    known: set[str] = set()
    while names:
        name = names.pop()
        if name not in known:
            known.add(name)
            names += _required(metadata.distribution(name))
    return known


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
