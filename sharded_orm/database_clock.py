"""The clock of a database server, for times that several hosts write and compare.

The clocks of the hosts may differ, so a host must not use its own clock for such a time.
"""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseClock(Now):
    """The present time in UTC, computed by the database."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, Any]:
        # Now.as_mysql() is not used: it returns the time in the session's time zone. When daylight
        # saving begins or ends there, the difference between two times would be wrong by an hour.
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)
