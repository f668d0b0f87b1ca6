"""Sessions of other programs on PostgreSQL."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.integration.moves.database import Database


class Session:
    """A session of psycopg's, as that of another program."""

    def __init__(self, database: Database, **parameters: Any) -> None:
        settings = database._settings
        self.driver = psycopg.connect(
            host=settings["HOST"],
            port=settings["PORT"],
            dbname=settings["NAME"],
            options=f"-c search_path={settings['SCHEMA']}",
            autocommit=True,
            **{"user": settings["USER"], "password": settings["PASSWORD"], **parameters},
        )

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = self.driver.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []

    def begin(self, level: str) -> None:
        """Begin a transaction, and take its snapshot."""
        self.run(f"BEGIN ISOLATION LEVEL {level}")
        self.run("SELECT 1 FROM pg_catalog.pg_class LIMIT 1")


def waits(session: Session, observer: Session) -> bool:
    """Whether a session waits for a lock."""
    pid = session.driver.info.backend_pid
    return bool(
        observer.run(
            f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
        )
    )
