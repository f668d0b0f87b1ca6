"""Tells whether a method is still the original one, or was replaced at run time.

Some packages replace methods of Django, to observe or to forbid calls. This library has shortcuts
that do the work of such a method without calling it. If the method was replaced, the library must
not take the shortcut, because the replacement would not be called.
"""

from __future__ import annotations

from types import FunctionType


def module_of(method: object) -> str:
    """Return the name of the module in which a function was written; "" for any other object.

    The attribute ``__module__`` does not tell: ``functools.wraps()`` copies it from the original to
    the replacement. So the name is read from the globals of the function. ``isinstance()`` does not
    tell either, because a mock can pose as a function. So the exact type is compared.
    """
    return str(method.__globals__.get("__name__")) if type(method) is FunctionType else ""
