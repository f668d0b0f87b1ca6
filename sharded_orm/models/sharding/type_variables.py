"""The type variable of querysets: the model of their rows.

The mypy plugin of django-stubs makes the methods of managers from those of querysets. It does so for
querysets with one type variable only, and leaves the variable as it is for managers of relations;
the bound lets these be used like ``Any``.
"""

from __future__ import annotations

from typing import Any, TypeVar

M = TypeVar("M", bound=Any, covariant=True)
