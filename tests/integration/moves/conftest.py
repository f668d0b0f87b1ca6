from __future__ import annotations

from tests.integration.imports.site import site_fixture
from tests.integration.moves.site import Site

site = site_fixture(Site, everywhere=True)
