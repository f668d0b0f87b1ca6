"""The backends that are compared: engines and settings of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.services.mariadb import Address

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
    #: Whether the schemas are on a server; otherwise the databases are in memory.
    on_server: bool
    #: Whether our side has a pool of sessions, which ``--scramble`` needs.
    pooled: bool
    #: More of ``DATABASES[…]["TEST"]``.
    test: dict[str, Any] = field(default_factory=dict)

    def databases(self, side: Side, server: Address | None) -> dict[str, dict[str, Any]]:
        """Return ``DATABASES``, as the suite's documentation asks for."""
        if not self.on_server:
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
            on_server=True,
            pooled=True,
            test={"CHARSET": "utf8mb4"},
        ),
        Backend(
            "sqlite",
            Side("stock", "django.db.backends.sqlite3", ""),
            Side("ours", "sharded_orm.backends.sqlite3", ""),
            on_server=False,
            pooled=False,
        ),
    )
}
