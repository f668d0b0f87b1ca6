"""Sessions with ticket servers (the databases that generate ids) while tests run.

A test case of Django forbids queries on databases that are not in its ``databases``. The library
gets ids over connections that Django's test cases do not know, so the class in this module forbids
the use of these connections.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

from sharded_orm.ids.tickets.pool import Lent, TicketSessionPool
from sharded_orm.ids.tickets.session import TicketSession


class TestSessionPool(TicketSessionPool):
    """The pool of sessions of one ticket server's test database.

    A test case may use these sessions only if the server's alias is in the ``databases`` of the
    test case.
    """

    __test__ = False

    def lend(self, deadline: float) -> Lent:
        """Return a context manager that lends a session until its block ends.

        :raises DatabaseOperationForbidden: the alias is not in the test case's ``databases``.
        """
        # If a test case must not use the database of this ticket server, Django replaces connect()
        # by a function that raises an error. But the pool may have a session that an earlier test
        # case has opened, and would lend it without a call of connect(). So call the function here,
        # to raise the error before a session is lent.
        connect: Any = connections[self.alias].__dict__.get("connect")
        if hasattr(connect, "wrapped"):
            connect()
        return super().lend(deadline)

    def give_back(self, session: TicketSession) -> None:
        """Keep the session open for the next test.

        Close it instead if its database cannot be dropped while sessions are open.
        """
        if session.prevents_drop:
            session.close()
        else:
            super().give_back(session)
