"""The example of the README, executed with the settings of the tutorial and the installed wheel."""

from __future__ import annotations

from pathlib import Path

from tests.docs.distribution import Installation
from tests.docs.markdown import ROOT, blocks
from tests.docs.test_tutorial import APPENDED, TUTORIALS, Project

STOCK_SETTINGS = """
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "readme"
INSTALLED_APPS = ["django.contrib.contenttypes"]
USE_TZ = True
"""

SET_UP = """
>>> import importlib
>>> from django.core.management import call_command
>>> call_command("makemigrations", "photos", verbosity=0)
>>> importlib.invalidate_caches()
>>> call_command("migrate", verbosity=0)
>>> call_command("migrate", database="directory", verbosity=0)
>>> call_command("migrate_shards", create=True, verbosity=0)
>>> import io
>>> call_command("tickets", "create", stdout=io.StringIO())
>>> from photos.models import Photo
"""


def test_readme(tmp_path: Path, installation: Installation) -> None:
    project = Project(tmp_path, installation)
    (tmp_path / "photosite").mkdir()
    (tmp_path / "photosite" / "settings.py").write_text(STOCK_SETTINGS)
    for block in blocks(TUTORIALS[0]):
        if block.code.startswith(f"# photosite/settings.py{APPENDED}"):
            project.write(block)
    readme = list(blocks(ROOT / "README.md"))
    (models,) = (block.code for block in readme if block.language == "python")
    (session,) = (block for block in readme if block.language == "pycon")
    for folder in ("data", "photos/migrations"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "photos" / "migrations" / "__init__.py").touch()
    (tmp_path / "photos" / "models.py").write_text(models)
    project.session([session], SET_UP)
