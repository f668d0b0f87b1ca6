"""Real servers for the tests: private, on free ports, in temporary folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence


class ServiceMissing(RuntimeError):
    """The program of a service is not installed."""


def required() -> bool:
    """Whether a missing service is a failure (in CI), not a reason to skip."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def find_program(service: str, *names: str, folders: Sequence[str] = ()) -> str:
    """Return the path of the first of ``names`` that is installed.

    :param folders: folders to search beside the ``PATH``.
    :raises ServiceMissing: none is installed.
    """
    # Servers are often installed where only root looks.
    path = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", *folders]
    )
    for name in names:
        program = shutil.which(name, path=path)
        if program:
            return program
    raise ServiceMissing(
        f"{service} is not installed: none of {list(names)!r} is on the PATH."
        " ./scripts/test installs what is missing on Debian."
    )
