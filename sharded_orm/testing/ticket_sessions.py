"""Sessions of ticket servers, the databases that give out ids, while tests run.

This package uses separate connections to get ids. Django's test cases do not know these connections,
so the class here applies the rules of the test cases to them.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

from sharded_orm.ids.tickets.pool import Lent, TicketSessionPool
from sharded_orm.ids.tickets.session import TicketSession


class TestSessionPool(TicketSessionPool):
    """The pool of sessions of one ticket server's test database.

    A test case may use the sessions only if its ``databases`` name the alias.
    """

    __test__ = False

    def lend(self, deadline: float) -> Lent:
        """Return a context manager that lends a session until its block ends.

        :raises DatabaseOperationForbidden: the test case's ``databases`` do not name the alias.
        """
        # On an alias that a test case may not use, SimpleTestCase replaces connect() by a function that
        # raises. That refuses new sessions only. Sessions that an earlier test case opened are refused here.
        connect: Any = connections[self.alias].__dict__.get("connect")
        if hasattr(connect, "wrapped"):
            connect()
        return super().lend(deadline)

    def give_back(self, session: TicketSession) -> None:
        """Keep the session for the next test. Close it if it would keep the database from being dropped."""
        if session.prevents_drop:
            session.close()
        else:
            super().give_back(session)
