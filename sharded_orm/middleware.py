"""The middleware that binds a shard key for each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.utils.module_loading import import_string

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidBoundKey, InvalidConfiguration
from sharded_orm.models.sharding.bound_key import bound, iterate_inside, iterate_inside_async


class BoundKeyMiddleware:
    """Binds the shard keys of each request: the request runs inside ``bound()``
    (:class:`~sharded_orm.models.sharding.bound_key.bound`).

    ``SHARDED_ORM["BOUND_KEY"]`` is the dotted path of a function. The function is called with the
    request, and returns the keys as a dict, such as ``{"tenant": request.tenant}``. If the result
    is None or an empty dict, the request has no bound key. Place the middleware after those that
    the function needs, such as ``AuthenticationMiddleware``.

    The keys stay bound while the parts of a streaming response are generated. Works with WSGI and
    ASGI. Under ASGI, the function may be a coroutine function.

    :raises InvalidConfiguration: ``BOUND_KEY`` is missing or cannot be imported. Raised when the
        server loads its middleware.
    :raises InvalidBoundKey: the function returns neither such a dict nor None. Raised during the
        request.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self._get_response = get_response
        self._keys_of = _function_of_request()
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        elif iscoroutinefunction(self._keys_of):
            raise InvalidConfiguration(
                [
                    "BOUND_KEY names a coroutine function, which needs ASGI and asynchronous middleware"
                ]
            )

    def __call__(self, request: Any) -> Any:
        if self._is_async:
            return self._respond_async(request)
        keys = self._keys_of(request)
        if not keys:
            return self._get_response(request)
        binding = _bound_to(keys)
        with binding:
            response = self._get_response(request)
        return _stream_inside(binding, response)

    async def _respond_async(self, request: Any) -> Any:
        # Run a plain (not async) function in a thread, because it may query the database.
        is_async = iscoroutinefunction(self._keys_of)
        keys = await (self._keys_of if is_async else sync_to_async(self._keys_of))(request)
        if not keys:
            return await self._get_response(request)
        binding = _bound_to(keys)
        with binding:
            response = await self._get_response(request)
        return _stream_inside(binding, response)


def _function_of_request() -> Callable[[Any], Any]:
    path = runtime.config().bound_key
    if path is None:
        raise InvalidConfiguration(
            ["BOUND_KEY is missing: BoundKeyMiddleware needs the dotted path of a function"]
        )
    try:
        function: Callable[[Any], Mapping[str, Any] | None] = import_string(path)
    except ImportError as exc:
        raise InvalidConfiguration([f"BOUND_KEY {path!r} cannot be imported: {exc}"]) from exc
    return function


def _bound_to(keys: Any) -> bound:
    if not isinstance(keys, Mapping):
        raise InvalidBoundKey(
            f"BOUND_KEY {runtime.config().bound_key!r} has returned {keys!r}. It returns a dict, such"
            ' as {"tenant": request.tenant}, or None.'
        )
    return bound(**keys)


def _stream_inside(binding: bound, response: Any) -> Any:
    """Return ``response``.

    If it is a streaming response, its parts are generated while the shard keys of ``binding`` are
    bound.
    """
    # Do not wrap the parts of a response that streams a file. To make them, no rows are read, and
    # the server may send the file without iterating over the parts.
    if response.streaming and getattr(response, "file_to_stream", None) is None:
        iterate = iterate_inside_async if response.is_async else iterate_inside
        response.streaming_content = iterate(binding, response.streaming_content)
    return response
