"""The backends that are compared: engines and settings of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.services import mariadb, postgresql
from tests.services.addresses import ServerAddress

#: The aliases that the suite uses.
ALIASES = ("default", "other")


@dataclass(frozen=True)
class Side:
    """One side of the comparison."""

    name: str
    engine: str
    #: Start of its schema names. Equally long on both sides: some tests depend on the lengths.
    prefix: str


@dataclass(frozen=True)
class Backend:
    """A backend of Django and ours that takes its place."""

    name: str
    stock: Side
    ours: Side
    #: The module with the servers on which the databases are; None: they are in memory.
    service: ModuleType | None = None
    #: Whether our side has a pool of sessions, which ``--scramble`` needs.
    pooled: bool = False
    #: Whether our side can work behind a pooler, which ``--pgbouncer`` starts.
    behind_pooler: bool = False
    #: More of ``DATABASES[…]["TEST"]``.
    test: dict[str, Any] = field(default_factory=dict)

    def databases(self, side: Side, server: ServerAddress | None) -> dict[str, dict[str, Any]]:
        """Return ``DATABASES``, as the suite's documentation asks for."""
        if not self.service:
            return {alias: {"ENGINE": side.engine} for alias in ALIASES}
        # Strings, as dbshell and others expect of settings.
        address = {key: str(value) for key, value in server.django().items()} if server else {}
        return {
            alias: {
                "ENGINE": side.engine,
                **address,
                "NAME": f"{side.prefix}_{alias}",
                "TEST": {"NAME": f"test_{side.prefix}_{alias}", **self.test},
            }
            for alias in ALIASES
        }


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "mysql",
            Side("stock", "django.db.backends.mysql", "suite_django"),
            Side("ours", "sharded_orm.backends.mysql", "suite_leased"),
            service=mariadb,
            pooled=True,
            test={"CHARSET": "utf8mb4"},
        ),
        Backend(
            "sqlite",
            Side("stock", "django.db.backends.sqlite3", ""),
            Side("ours", "sharded_orm.backends.sqlite3", ""),
        ),
        Backend(
            "postgresql",
            Side("stock", "django.db.backends.postgresql", "suite_django"),
            Side("ours", "sharded_orm.backends.postgresql", "suite_leased"),
            service=postgresql,
            pooled=True,
            behind_pooler=True,
        ),
    )
}
