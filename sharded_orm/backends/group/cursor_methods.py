"""A shorter way than Django's methods to open a cursor of a shard's connection object.

Each statement opens a cursor, so this saves time. But another package may have replaced methods of
Django, on Django's class, on a class of its own or on one object, to observe or to forbid
statements. So the shorter way is taken only if all methods are Django's own.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from sharded_orm.method_origin import module_of

# Django wraps ensure_connection() by a decorator of this module. So a method that seems to come
# from this module is accepted as Django's own.
_GUARDS = "django.utils.asyncio"

# The methods of a connection object that Django calls, directly or not, to open a cursor.
_METHODS = (
    "cursor", "_cursor", "create_cursor", "make_cursor", "_prepare_cursor", "ensure_connection",
    "validate_thread_sharing", "close_if_health_check_failed", "validate_no_broken_transaction", "queries_logged",
)  # fmt: skip
# The methods in _METHODS that ShardConnectionMixin overrides. The mixin's methods call Django's
# methods of the same names. Another package may have replaced these, so they are examined, too.
_INHERITED = ("_cursor", "queries_logged")
# A cache of are_djangos(). It maps each class of connection objects to a tuple: the methods that
# were examined, followed by the result (True or False). The result is valid as long as the class
# still has exactly these methods.
_examined: dict[Any, tuple[Any, ...]] = {}
_UNKNOWN = (*[None] * (len(_METHODS) + len(_INHERITED)), False)


def open_cursor(wrapper: Any, name: str | None) -> Any:
    """Return a new cursor, as ``wrapper._cursor(name)`` would. Call this only if
    :func:`opens_as_django` returns True.

    It does what BaseDatabaseWrapper._cursor() and BaseDatabaseWrapper._prepare_cursor() do.
    """
    try:
        cursor = wrapper.create_cursor(name)
        make = wrapper.make_debug_cursor if wrapper.queries_logged else wrapper.make_cursor
        return make(cursor)
    except BaseException as exc:
        wrapper.wrap_database_errors.__exit__(type(exc), exc, exc.__traceback__)
        raise


def opens_as_django(wrapper: Any, inherited: Any) -> bool:
    """Whether :func:`open_cursor` can be called in place of Django's methods, because Django's
    methods would only open a cursor, too.

    Django's methods do more if there is no connection yet, if the connection has to be tested, or
    if it belongs to another thread. They must also be called if another package has replaced one of
    them.

    :param inherited: see :func:`are_djangos`.
    """
    return (
        wrapper.connection is not None
        and (not wrapper.health_check_enabled or wrapper.health_check_done)
        and wrapper._thread_ident == get_ident()
        and are_djangos(wrapper, inherited)
    )


def are_djangos(wrapper: Any, inherited: Any) -> bool:
    """Whether all methods that open a cursor of ``wrapper``, a shard's connection object, are
    Django's or this package's.

    :param inherited: ``super(ShardConnectionMixin, type(wrapper))``, which finds the methods that
        the mixin overrides.
    """
    kind = type(wrapper)
    known = _examined.get(kind, _UNKNOWN)
    # Compare by "is", not by "==". Some packages replace a method by an object that claims to be
    # equal to it.
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
