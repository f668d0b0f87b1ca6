"""The clock of a database, for times that several hosts compare.

The hosts' own clocks may differ, so their times could not be compared.
"""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseClock(Now):
    """The present time of the database's clock, in UTC."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, Any]:
        # Now.as_mysql is not used: it returns the time in the session's time zone. If that time
        # zone has daylight saving, the difference between two times may be wrong by an hour.
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)
