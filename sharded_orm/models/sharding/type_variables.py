"""The type variable of querysets. It stands for the model of their rows.

The mypy plugin of django-stubs copies the methods of querysets to managers, but only if the
queryset has a single type variable. For managers of relations, the plugin does not say which model
the variable stands for. Because the bound of the variable is ``Any``, mypy then treats the rows of
such managers as ``Any``, and accepts any use of them.
"""

from __future__ import annotations

from typing import Any, TypeVar

M = TypeVar("M", bound=Any, covariant=True)
