from __future__ import annotations

from tests.integration.imports.site import Site, site_fixture

site = site_fixture(Site, everywhere=True)
