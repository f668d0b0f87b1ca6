"""Settings of the processes of these tests, which all import this module.

Imports no model: a process configures Django first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Project:
    """The settings of a process."""

    databases: dict[str, dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def aliases(self) -> list[str]:
        return list(self.databases)

    def configure(self) -> None:
        import django
        from django.conf import settings

        settings.configure(
            INSTALLED_APPS=["django.contrib.contenttypes", "sharded_orm"],
            DATABASES={
                "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
                **self.databases,
            },
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            SHARDED_ORM={"TICKETS": self.aliases, "TICKET_OPTIONS": self.options},
            LOGGING_CONFIG=None,
            USE_TZ=True,
        )
        django.setup()

    def generator(self) -> Any:
        """Return the generator of a configured process."""
        from sharded_orm import runtime

        return runtime.tickets()
