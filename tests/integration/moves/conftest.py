from __future__ import annotations

from tests.integration.imports.site import site_fixture
from tests.integration.moves.database import sessions_fixture
from tests.integration.moves.postgresql_session import Session
from tests.integration.moves.site import Site

site = site_fixture(Site, everywhere=True)


#: On PostgreSQL.
sessions = sessions_fixture(Session, 3)
