"""Opens a cursor of a shard's connection object in a shorter way than Django's methods.

Other packages replace these methods to observe or to forbid statements, on Django's class or on a
class or an object of their own. So the short way is taken only if all methods are Django's own.
"""

from __future__ import annotations

from threading import get_ident
from types import MethodType
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.method_origin import module_of

_CONNECTIONS = BaseDatabaseWrapper.__module__
# Django guards ensure_connection() by a decorator of this module.
_GUARDS = "django.utils.asyncio"

# For each class of connection objects: the methods that were examined last, and whether all of them are
# Django's.
_examined: dict[Any, tuple[Any, Any, Any, Any, Any, bool]] = {}
_NOTHING = (None, None, None, None, None, False)

# The methods that a statement passes on its way to a cursor.
_METHODS = (
    "cursor", "_cursor", "create_cursor", "make_cursor", "_prepare_cursor", "ensure_connection",
    "validate_thread_sharing", "close_if_health_check_failed", "validate_no_broken_transaction",
)  # fmt: skip
# The same as _examined, for all of these methods.
_examined_kinds: dict[Any, tuple[Any, ...]] = {}
_UNKNOWN = (*[None] * (len(_METHODS) + 1), False)


def open_cursor(wrapper: Any, name: str | None) -> Any:
    """Return a new cursor, as ``wrapper._cursor(name)`` does if :func:`opens_as_django` is true.

    This does the same as BaseDatabaseWrapper._cursor and BaseDatabaseWrapper._prepare_cursor.
    """
    try:
        cursor = wrapper.create_cursor(name)
        make = wrapper.make_debug_cursor if wrapper.queries_logged else wrapper.make_cursor
        return make(cursor)
    except BaseException as exc:
        wrapper.wrap_database_errors.__exit__(type(exc), exc, exc.__traceback__)
        raise


def opens_as_django(wrapper: Any, cursor_method: Any) -> bool:
    """Whether Django's methods would only open a cursor: the connection answers and belongs to this
    thread, and neither ``cursor_method`` nor a method that it calls was replaced.

    :param cursor_method: the method ``_cursor``, bound to ``wrapper``, that would be called.
    """
    return (
        wrapper.connection is not None
        and (not wrapper.health_check_enabled or wrapper.health_check_done)
        and wrapper._thread_ident == get_ident()
        and _are_djangos(wrapper, cursor_method)
    )


def _are_djangos(wrapper: Any, cursor_method: Any) -> bool:
    """Whether ``cursor_method`` and all methods that it calls are Django's."""
    # Compare by ``type`` and ``is`` only: the methods of some packages claim to be the original.
    if type(cursor_method) is not MethodType:
        return False
    kind = type(wrapper)
    cursor, prepare = cursor_method.__func__, kind._prepare_cursor
    check, ensure = kind.close_if_health_check_failed, kind.ensure_connection
    validate = kind.validate_thread_sharing
    known = _examined.get(kind, _NOTHING)
    if (
        known[0] is cursor
        and known[1] is prepare
        and known[2] is check
        and known[3] is ensure
        and known[4] is validate
    ):
        is_known = known[5]
    else:
        methods = cursor, prepare, check, ensure, validate
        is_known = all(map(_is_djangos, methods))
        _examined[kind] = *methods, is_known
    if not is_known:
        return False
    own: dict[str, Any] = wrapper.__dict__
    return (
        "ensure_connection" not in own
        and "validate_thread_sharing" not in own
        and "close_if_health_check_failed" not in own
        and "_prepare_cursor" not in own
    )


def are_djangos(wrapper: Any) -> bool:
    """Whether all methods that open a cursor of the shard's ``wrapper`` are Django's or this package's."""
    kind = type(wrapper)
    known = _examined_kinds.get(kind, _UNKNOWN)
    if not (
        known[0] is kind.cursor
        and known[1] is kind._cursor
        and known[2] is kind.create_cursor
        and known[3] is kind.make_cursor
        and known[4] is kind._prepare_cursor
        and known[5] is kind.ensure_connection
        and known[6] is kind.validate_thread_sharing
        and known[7] is kind.close_if_health_check_failed
        and known[8] is kind.validate_no_broken_transaction
        and known[9] is BaseDatabaseWrapper._cursor  # type: ignore[attr-defined]  # missing in Django's type stubs
    ):
        methods = [getattr(kind, name) for name in _METHODS]
        methods.append(BaseDatabaseWrapper._cursor)  # type: ignore[attr-defined]  # missing in Django's type stubs
        known = _examined_kinds[kind] = (*methods, all(map(_is_known, methods)))
    return bool(known[10]) and wrapper.__dict__.keys().isdisjoint(_METHODS)


def _is_djangos(method: Any) -> bool:
    return _module_of(method) == _CONNECTIONS


def _is_known(method: Any) -> bool:
    return _module_of(method).startswith(("django.db.backends.", "sharded_orm.backends."))


def _module_of(method: Any) -> str:
    module = module_of(method)
    return module_of(getattr(method, "__wrapped__", None)) if module == _GUARDS else module
