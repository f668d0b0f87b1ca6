"""The type variable of querysets: the model of their rows.

The mypy plugin of django-stubs copies the methods of querysets to managers, but only if the
queryset has a single type variable. For managers of relations, the plugin leaves the variable open.
Because its bound is ``Any``, mypy then accepts any use of their rows.
"""

from __future__ import annotations

from typing import Any, TypeVar

M = TypeVar("M", bound=Any, covariant=True)
