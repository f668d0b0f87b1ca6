"""The type variable of querysets: the model of their rows.

The mypy plugin of django-stubs copies the methods of querysets to managers. It does so only for
querysets with a single type variable. For managers of relations, the plugin leaves the variable
open; then its bound makes the rows usable like ``Any``.
"""

from __future__ import annotations

from typing import Any, TypeVar

M = TypeVar("M", bound=Any, covariant=True)
