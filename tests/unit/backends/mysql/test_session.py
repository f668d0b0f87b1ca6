"""Values as they come from the driver and go to it, in the ways that take less time."""

from __future__ import annotations

import pytest
from MySQLdb.times import DateTime_or_None

from sharded_orm.backends.mysql.session import datetime_or_none


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-02 03:04:05",
        "2026-01-02 03:04:05.678901",
        "2026-01-02 03:04:05.67",
        "2026-01-02 03:04:05.678",
        "9999-12-31 23:59:59.999999",
        "0001-01-01 00:00:00",
        "2026-02-30 03:04:05",
        b"2026-01-02 03:04:05",
        "2026-00-00 00:00:00",
        "0000-00-00 00:00:00",
        "0000-00-00 00:00:00.000000",
        "2026-01-02",
        "0000-00-00",
        "",
    ],
)
def test_dates_with_times_are_those_of_the_driver(text: str | bytes) -> None:
    assert repr(datetime_or_none(text)) == repr(DateTime_or_None(text))
