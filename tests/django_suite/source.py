"""Django's source distribution: the installed wheel does not include the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import django


class SourceMissing(RuntimeError):
    """The source distribution is not in the cache and cannot be downloaded."""


def default_cache() -> Path:
    """Return the user's cache folder; outside of the repository, shared by its checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sharded-orm"


def version() -> str:
    """Return the version of Django that is installed."""
    return django.get_version()


def fetch(cache: Path) -> Path:
    """Return the path of the archive of exactly the installed version, downloading it once.

    :raises SourceMissing: the index does not have it, or cannot be reached.
    """
    if archive := _find(cache, version()):
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    # Into a folder of its own first: an interrupted download must not stay in the cache.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        # pip asks the package for its metadata and so needs its build backend. Only the isolated
        # build surely has a recent one.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--no-binary", "Django", "--dest", folder, f"Django=={version()}",
        ]  # fmt: skip
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        archive = _find(Path(folder), version())
        if done.returncode or archive is None:
            raise SourceMissing(
                f"pip could not download the source of Django {version()}; put its archive into"
                f" {str(cache)!r} by hand.\n{done.stdout}{done.stderr}"
            )
        target = cache / archive.name
        archive.replace(target)
    return target


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the archive into ``folder`` and return its top folder, which has ``tests/``."""
    with tarfile.open(archive) as packed:
        # Python 3.11.2 (Debian 12) does not know filters yet.
        filters: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(folder, **filters)
    tops = [path.parent for path in folder.glob("*/tests") if (path / "runtests.py").exists()]
    if len(tops) != 1:
        raise SourceMissing(f"{str(archive)!r} holds no tests/runtests.py; remove it.")
    return tops[0]


def _find(folder: Path, version: str) -> Path | None:
    # The archive used to be named Django-X.tar.gz and is now named django-X.tar.gz.
    name = f"django-{version}.tar.gz"
    if not folder.is_dir():
        return None
    return next((path for path in folder.iterdir() if path.name.lower() == name), None)
