"""Sessions of ticket servers while tests run.

Ids are taken on connections of the library, which Django's test cases do not know.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

from sharded_orm.ids.tickets.pool import Lent, TicketSessionPool
from sharded_orm.ids.tickets.session import TicketSession


class TestSessionPool(TicketSessionPool):
    """The sessions of one test database. A test case may use them only if it names the alias."""

    __test__ = False

    def lend(self, deadline: float) -> Lent:
        """Lend sessions until the context ends.

        :raises DatabaseOperationForbidden: the test case does not name the alias.
        """
        # SimpleTestCase replaces this method on aliases that a test case may not use. By itself
        # that refuses new sessions, but not those of an earlier test case.
        connect: Any = connections[self.alias].__dict__.get("connect")
        if hasattr(connect, "wrapped"):
            connect()
        return super().lend(deadline)

    def give_back(self, session: TicketSession) -> None:
        """Keep the session for the next test, unless the runner could not drop the database."""
        if session.prevents_drop:
            session.close()
        else:
            super().give_back(session)
