"""The differences between MariaDB and MySQL. No other module distinguishes the two.

The tests run on MariaDB only. SQL that both servers understand is written once, in other modules.
The statements about replication, in ``backends.mysql.replication``, work on MariaDB only: a
promotion refuses every other server.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MySQLFlavor:
    """The properties of MariaDB or of MySQL, the two kinds of servers that Django's MySQL backend
    works with.
    """

    #: Collation that compares every character of a text, including spaces at the end.
    exact_collation: str
    #: Storage engine for the counter tables of ticket servers. It locks whole tables, so two
    #: REPLACE statements never get the same number.
    counter_engine: str
    #: Names of server variables. Two connections with the same values of these variables lead to
    #: the same server. Some versions of the server lack some of these variables.
    identity: tuple[str, ...]
    #: Error code that a client gets if the server has closed its session. The server does so if an
    #: administrator has killed the session, or if the session was idle for too long.
    session_ended: int
    #: Error code for a statement that took longer than the server allows.
    statement_timeout: int
    #: Whether a replica of this kind of server can be promoted to the primary. True if
    #: ``backends.mysql.replication`` knows the server's SQL for replication.
    can_be_promoted: bool
    #: The session variable that limits the time of each statement, in seconds with fractions, such
    #: as 0.5; "" if the server has no such variable.
    statement_limit: str
    #: The name of a column in the server's list of sessions. The column has the number of each
    #: session's last statement. The server numbers the statements of all sessions together. If it
    #: has no such column, this is "0", which SQL reads as the number 0.
    statement_number: str
    #: The smallest value of ``lock_wait_timeout``, in seconds. If the server accepts 0, a statement
    #: can fail at once if it does not get a lock.
    least_lock_wait: int
    #: Name of the table in information_schema that has the internal ids of InnoDB's tables.
    innodb_tables: str

    @classmethod
    def of(cls, connection: Any) -> MySQLFlavor:
        """Return the flavor of the server to which ``connection`` leads.

        The first call for a connection may query the server's version.

        :param connection: a connection object of Django's MySQL backend, or of a backend derived
            from it.
        """
        return MARIADB if connection.mysql_is_mariadb else MYSQL

    def lock_timeouts(self, seconds: float) -> dict[str, float]:
        """Return session variables that limit a statement's wait for locks to about ``seconds``.

        For MariaDB, the result is such as ``{"max_statement_time": 0.5}``, which limits the whole
        time of a statement. For MySQL, it limits only the wait for locks. MySQL accepts only whole
        seconds, and so waits for at least one second.
        """
        if self.statement_limit:
            return {self.statement_limit: seconds}
        whole = max(1, int(seconds))
        return {"lock_wait_timeout": whole, "innodb_lock_wait_timeout": whole}

    @classmethod
    def of_version(cls, version: str) -> MySQLFlavor:
        """Return the flavor of a server, given the result of ``SELECT VERSION()``."""
        return MARIADB if "mariadb" in version.lower() else MYSQL

    @classmethod
    def of_variables(cls, names: Set[str]) -> MySQLFlavor:
        """Return the flavor of a server that has the variables ``names``.

        :param names: those variables of the server, in lower case, that are in :attr:`identity` of
            ``MARIADB`` or ``MYSQL``.
        """
        return MYSQL if names >= set(MYSQL.identity) else MARIADB


MARIADB = MySQLFlavor(
    exact_collation="utf8mb4_nopad_bin",
    # Use Aria for counters: in contrast to MyISAM, it survives a crash of the server.
    counter_engine="Aria",
    # server_uid alone is not enough, because it is made of the network address and the port: two
    # containers may have the same server_uid.
    identity=("server_uid", "hostname", "port", "server_id"),
    session_ended=1927,  # ER_CONNECTION_KILLED
    statement_timeout=1969,  # ER_STATEMENT_TIMEOUT
    can_be_promoted=True,
    statement_limit="max_statement_time",
    statement_number="query_id",
    least_lock_wait=0,
    innodb_tables="innodb_sys_tables",
)
MYSQL = MySQLFlavor(
    # This collation exists from MySQL 8.0.17 on.
    exact_collation="utf8mb4_0900_bin",
    counter_engine="MyISAM",
    identity=("server_uuid",),
    session_ended=4031,  # ER_CLIENT_INTERACTION_TIMEOUT
    statement_timeout=3024,  # ER_QUERY_TIMEOUT
    can_be_promoted=False,
    # MySQL has only max_execution_time, which limits no statement but SELECT.
    statement_limit="",
    statement_number="0",
    least_lock_wait=1,
    innodb_tables="innodb_tables",
)
FLAVORS = (MARIADB, MYSQL)
