"""The next release of the site, for rolling upgrades of a pair: a copy whose photos have a licence."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The new field. An old release does not name it in its INSERT, so the database must know the default.
FIELD = 'licence = models.CharField(max_length=20, default="CC BY 4.0")'
# The line of the models after which the field stands.
_BEFORE = "    title = models.CharField(max_length=200)\n"


def write(folder: Path) -> Path:
    """Write the next release into ``folder``, which is emptied first. Return a program there, which runs
    its ``manage.py`` on the databases of this process.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "testproject",
        folder / "testproject",
        ignore=shutil.ignore_patterns("var", "__pycache__"),
    )
    shutil.copy(ROOT / "manage.py", folder)
    models = folder / "testproject" / "photos" / "models.py"
    text = models.read_text()
    if text.count(_BEFORE) != 1:
        raise RuntimeError(f"{models} has not one line {_BEFORE!r}.")
    models.write_text(text.replace(_BEFORE, f"{_BEFORE}    {FIELD}\n"))
    program = folder / "manage"
    program.touch(mode=0o700)  # it has the passwords of the servers
    program.write_text(
        "#!/bin/sh\n"
        f"cd {shlex.quote(str(folder))} || exit\n"
        f"export DJANGO_SETTINGS_MODULE={os.environ['DJANGO_SETTINGS_MODULE']}\n"
        + "".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in os.environ.items()
            if name.startswith("SHARDED_ORM_DEMO_")
        )
        + f'exec {shlex.quote(sys.executable)} manage.py "$@"\n'
    )
    subprocess.run(
        [program, "makemigrations", "photos", "--name", "photo_licence", "--verbosity", "0"],
        check=True,
    )
    return program
