"""Sphinx configuration. Build with ``sphinx-build -W -b html docs docs/_build/html``."""

from configparser import ConfigParser
from pathlib import Path

_setup = ConfigParser()
_setup.read(Path(__file__).parent.parent / "setup.cfg", encoding="utf-8")

project = "sharded_orm"
release = _setup["metadata"]["version"]
copyright = "the sharded_orm contributors"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "decisions/template.md"]
nitpicky = True

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
