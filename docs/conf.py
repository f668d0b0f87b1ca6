"""Sphinx configuration. Build with ``sphinx-build -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]

from sharded_orm import __version__  # noqa: E402  # found by the line above

project = "sharded_orm"
# Also the version in the metadata of the package, see setup.cfg.
release = version = __version__
author = "the sharded_orm contributors"
copyright = f"{author}. Version {release}"

extensions = ["myst_parser", "index_of_names"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "substitution"]
myst_substitutions = {"release": release}
myst_heading_anchors = 3
exclude_patterns = ["_build", "decisions/template.md"]
nitpicky = True

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
