from __future__ import annotations

from tests.integration.imports.site import site_fixture
from tests.integration.mirrors.site import Site

site = site_fixture(Site)
site_everywhere = site_fixture(Site, everywhere=True)
