"""Reads the binary log of a MariaDB server by SQL: its transactions, with their statements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

# The number of events that one query reads.
_PAGE: Final = 1000
# How many events to read at the beginning of a log file. One of them lists, for each replication
# domain, the last position in the earlier log files.
_HEAD: Final = 3
_GTID: Final = re.compile(r"GTID (\d+)-(\d+)-(\d+)")
_LISTED: Final = re.compile(r"(\d+)-\d+-(\d+)")
_TABLE: Final = re.compile(r"table_id: \d+ \((.+)\)")


@dataclass(frozen=True)
class LoggedTransaction:
    """A transaction in the binary log.

    :param gtid: the global transaction id, such as ``1-1-15``: domain, server and sequence number.
    :param tables: the tables whose rows it changed, as ``schema.table``. They are the keys of a
        dict, which keeps their order.
    :param statements: its statements, if the server logs them (``binlog_annotate_row_events``).
    """

    gtid: str
    tables: dict[str, None] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)


class BinaryLog:
    """The binary log of one server.

    :param query: a function that returns the rows of a query as dicts.
    """

    def __init__(self, query: Callable[..., list[dict[str, Any]]]) -> None:
        self._query = query

    def transactions(self, domain: int, after: int) -> Iterator[LoggedTransaction]:
        """Yield the transactions of the replication domain ``domain`` whose sequence number is
        greater than ``after``.
        """
        current: LoggedTransaction | None = None
        for event in self._events(domain, after):
            kind, info = str(event["Event_type"]), str(event["Info"])
            if kind == "Gtid":
                if current is not None:
                    yield current
                match = _GTID.search(info)
                assert match is not None, info
                wanted = int(match[1]) == domain and int(match[3]) > after
                current = LoggedTransaction("-".join(match.groups())) if wanted else None
            elif current is not None:
                if kind in ("Annotate_rows", "Query"):
                    current.statements.append(info)
                elif kind == "Table_map" and (match := _TABLE.fullmatch(info)):
                    current.tables[match[1]] = None
        if current is not None:
            yield current

    def _events(self, domain: int, after: int) -> Iterator[dict[str, Any]]:
        names: list[str] = []
        for row in reversed(self._query("SHOW BINARY LOGS")):
            names.insert(0, str(row["Log_name"]))
            if self._last_before(names[0], domain) <= after:
                break
        for name in names:
            yield from self._events_of(name)

    def _last_before(self, name: str, domain: int) -> int:
        """Return the last sequence number of ``domain`` in the log files before the file ``name``;
        0 if there is none.
        """
        for row in self._query(f"SHOW BINLOG EVENTS IN %s LIMIT {_HEAD}", name):
            if row["Event_type"] == "Gtid_list":
                numbers = {int(d): int(number) for d, number in _LISTED.findall(str(row["Info"]))}
                return numbers.get(domain, 0)
        return 0

    def _events_of(self, name: str) -> Iterator[dict[str, Any]]:
        # A log file begins with a magic number of 4 bytes. The first event follows.
        start = 4
        while True:
            sql = f"SHOW BINLOG EVENTS IN %s FROM {start:d} LIMIT {_PAGE}"
            page = self._query(sql, name)
            yield from page
            if len(page) < _PAGE:
                return
            start = int(page[-1]["End_log_pos"])
