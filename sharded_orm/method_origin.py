"""Tells whether a method is still the one that its class was defined with.

Other packages replace methods of Django to observe or to forbid what they do. A short cut past such a
method must not be taken then.
"""

from __future__ import annotations

from types import FunctionType


def module_of(method: object) -> str:
    """Return the name of the module in which a function was written; "" for any other object.

    A replacement may claim to be the original: ``functools.wraps()`` copies ``__module__``, and some
    objects deceive ``isinstance()``. This function believes neither.
    """
    return str(method.__globals__.get("__name__")) if type(method) is FunctionType else ""
