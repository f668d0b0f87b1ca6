"""Opens a cursor of a shard's connection object in a shorter way than Django's methods.

Other packages replace these methods to observe or to forbid statements, on Django's class or on a
class or an object of their own. So the short way is taken only if all methods are Django's own.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from sharded_orm.method_origin import module_of

# Django guards ensure_connection() by a decorator of this module.
_GUARDS = "django.utils.asyncio"

# The methods that a statement passes on its way to a cursor.
_METHODS = (
    "cursor", "_cursor", "create_cursor", "make_cursor", "_prepare_cursor", "ensure_connection",
    "validate_thread_sharing", "close_if_health_check_failed", "validate_no_broken_transaction", "queries_logged",
)  # fmt: skip
# The methods that ShardConnectionMixin overrides, and which then call the inherited ones.
_INHERITED = ("_cursor", "queries_logged")
# For each class of connection objects: all these methods, as they were examined last, and whether all of
# them are known.
_examined: dict[Any, tuple[Any, ...]] = {}
_UNKNOWN = (*[None] * (len(_METHODS) + len(_INHERITED)), False)


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


def opens_as_django(wrapper: Any, inherited: Any) -> bool:
    """Whether Django's methods would only open a cursor: the connection answers and belongs to this
    thread, and no method that opens a cursor was replaced.

    :param inherited: see :func:`are_djangos`.
    """
    return (
        wrapper.connection is not None
        and (not wrapper.health_check_enabled or wrapper.health_check_done)
        and wrapper._thread_ident == get_ident()
        and are_djangos(wrapper, inherited)
    )


def are_djangos(wrapper: Any, inherited: Any) -> bool:
    """Whether all methods that open a cursor of the shard's ``wrapper`` are Django's or this package's.

    :param inherited: ``super(ShardConnectionMixin, type(wrapper))``.
    """
    kind = type(wrapper)
    known = _examined.get(kind, _UNKNOWN)
    # Compare by "is" only: the methods of some packages claim to be equal to the original.
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
        and known[9] is kind.queries_logged
        and known[10] is inherited._cursor
        and known[11] is inherited.queries_logged
    ):
        methods = [getattr(kind, name) for name in _METHODS]
        methods += [getattr(inherited, name) for name in _INHERITED]
        known = _examined[kind] = (*methods, all(map(_is_known, methods)))
    return bool(known[12]) and wrapper.__dict__.keys().isdisjoint(_METHODS)


def _is_known(method: Any) -> bool:
    module = module_of(method.fget if type(method) is property else method)
    if module == _GUARDS:
        module = module_of(getattr(method, "__wrapped__", None))
    return module.startswith(("django.db.backends.", "sharded_orm.backends."))
