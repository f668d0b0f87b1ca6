from __future__ import annotations

from tests.integration.entities.site import Site
from tests.integration.imports.site import site_fixture

site = site_fixture(Site)
site_everywhere = site_fixture(Site, everywhere=True)
