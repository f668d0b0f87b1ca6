"""Replacements of methods that claim to be the original in every way, as the library wrapt makes them.

Packages that trace programs use that library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TransparentMethod:
    """Calls ``note`` with the object, and then the original method.

    Its class, its attributes and comparisons are those of the original method.
    """

    def __init__(self, original: Any, note: Callable[[Any], None], bound_to: Any = None) -> None:
        self._parts = original, note, bound_to

    @property  # type: ignore[misc]  # isinstance() believes it.
    def __class__(self) -> Any:
        return type(self._parts[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts[0], name)

    def __eq__(self, other: object) -> bool:
        return bool(self._parts[0] == other)

    def __hash__(self) -> int:
        return hash(self._parts[0])

    def __get__(self, instance: Any, owner: Any) -> TransparentMethod:
        original, note, _ = self._parts
        return TransparentMethod(original.__get__(instance, owner), note, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, note, bound_to = self._parts
        note(args[0] if bound_to is None else bound_to)
        return original(*args, **kwargs)
