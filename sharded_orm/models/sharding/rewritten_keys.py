"""Foreign keys to which the deletion of the related row gives another value."""

from __future__ import annotations

from typing import Any


def set_arguments(on_delete: Any) -> tuple[Any, ...] | None:
    """Return the arguments of ``SET()`` if ``on_delete`` is a function that it has returned."""
    # Migrations call this method to write SET() into their files.
    if not hasattr(on_delete, "deconstruct"):
        return None
    path, arguments, _ = on_delete.deconstruct()
    return arguments if path == "django.db.models.SET" else None
