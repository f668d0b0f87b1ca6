"""The bound key, that is, the shard key that all queries and new rows use inside a ``with`` block.

A binding (the bound shard keys and their values) is stored in a context variable. So it applies in
the current thread or task. It also applies in code that gets a copy of the context: code that is
called by ``sync_to_async()`` or ``asyncio.to_thread()``, and new tasks. A new thread begins without
a binding.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any, Self, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db.models import Field, Model

from sharded_orm.exceptions import BoundKeyMismatch, InvalidBoundKey
from sharded_orm.models.sharding.imports_under_way import count_imports_under_way
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import ShardOptions, required_options, shard_options
from sharded_orm.models.sharding.same_key import relates_one_key

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class BoundKey:
    """The value to which an active ``bound()`` block binds the shard key of one model.

    :param name: the ``attname`` of the shard key's field, such as ``owner_id``. An automatic
        many-to-many table has no field for the shard key. For such a table, ``name`` is the path to
        the key of one of the two related rows, such as ``photo__owner_id``.
    :param value: the value in the form that the field's ``get_prep_value()`` returns.
    """

    name: str
    value: Any

    def __str__(self) -> str:
        return f"bound({self.name}={self.value!r})"


#: The ``bound_key`` of a query that is meant for all keys. For example, ``scatter()`` was called on
#: it, or it looks up the row to which a foreign key refers.
EXEMPT = BoundKey("", None)


class _Binding:
    """The bound keys of one entered ``with`` block of :class:`bound` or :class:`unbound`.

    Immutable, except that it remembers the results of :meth:`key_of`.

    :param owner: the :class:`bound` or :class:`unbound` object of the block.
    :param outer: the binding of the enclosing block; None if there is none.
    :param values: maps the field of each bound shard key to its value, as the field stores it.
        Values of outer blocks are included. Empty in an ``unbound()`` block.
    """

    def __init__(
        self, owner: object, outer: _Binding | None, values: Mapping[Field[Any, Any], Any]
    ) -> None:
        self.owner = owner
        self.outer = outer
        self.values = values
        self._keys: dict[type[Any], BoundKey | None] = {}
        self._thread = get_ident()
        self._imports = count_imports_under_way()

    def holds(self) -> bool:
        """Return whether the binding applies to the calling code.

        It does not apply to the code of a module that is imported inside the block. For example,
        the first request imports a module of views, in which a view has the attribute
        ``queryset = Photo.objects.all()``. This queryset serves all requests, so it must not keep
        the key of the first one.
        """
        imports = count_imports_under_way()
        # If code that is being imported, such as a script, runs the block, this import began before
        # the block. The binding must then apply. So count only imports that began inside the block.
        return not imports or (get_ident() == self._thread and imports <= self._imports)

    def key_of(self, model: type[Any]) -> BoundKey | None:
        """Return the shard key that rows of ``model`` must have inside the block, or None."""
        if not self.values:
            return None
        try:
            return self._keys[model]
        except KeyError:
            options = shard_options(model)
            bound_key = None if options is None else self._look_up(options)
            return self._keys.setdefault(model, bound_key)

    def _look_up(self, options: ShardOptions) -> BoundKey | None:
        if options.key is not None:
            value = self.values.get(options.key)
            return None if value is None else BoundKey(options.key.attname, value)
        # The model is an automatic many-to-many table. Its rows have the shard key of the two rows
        # that they relate. So use the bound key of either related model.
        if not relates_one_key(options):
            return None
        for relation in options.relations:
            key: Any = required_options(relation.related_model).key
            if (value := self.values.get(key)) is not None:
                return BoundKey(f"{relation.name}__{key.attname}", value)
        return None


_binding: ContextVar[_Binding | None] = ContextVar("sharded_orm_bound_key", default=None)


#: Returns the innermost binding of the current context; None if there is no binding. Each query
#: calls this. So it is the method get() of the context variable itself, because a Python function
#: around it would be slower.
last_binding: Callable[[], object | None] = _binding.get


def _binding_in_force() -> _Binding | None:
    binding = _binding.get()
    return binding if binding is not None and binding.holds() else None


def is_any_bound() -> bool:
    """Return whether ``bound()`` has set a shard key, of any model, for the calling code."""
    binding = _binding.get()
    return binding is not None and binding.holds() and bool(binding.values)


def key_in_force(model: type[Any]) -> BoundKey | None:
    """Return the shard key that ``bound()`` has set for rows of ``model``, or None.

    Use :attr:`BoundKey.name` only as a name in filters. For an automatic many-to-many table, which
    has no field for the shard key, it is a path such as ``photo__owner_id``.
    """
    binding = _binding_in_force()
    return None if binding is None else binding.key_of(model)


class _Block:
    """The base class of :class:`bound` and :class:`unbound`.

    The same object can be entered several times, even by several threads and tasks at once, because
    each thread or task has its own list of entered blocks (:mod:`contextvars`).
    """

    def _values_inside(self, outer: _Binding | None) -> Mapping[Field[Any, Any], Any]:
        """Return the shard keys that are bound inside the block, as a dict from field to value."""
        raise NotImplementedError

    def _of_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Block:
        """Return the block in which one call of a decorated function runs."""
        return self

    def __enter__(self) -> Self:
        _binding.set(_Binding(self, _binding.get(), self._values_inside(_binding_in_force())))
        return self

    def __exit__(self, *exc_info: object) -> None:
        # If a generator is abandoned, the garbage collector closes it, in any thread or task. This
        # ends the generator's block there. If that thread or task has not entered this block, leave
        # its binding (its bound keys) unchanged.
        binding = _binding.get()
        while binding is not None and binding.owner is not self:
            binding = binding.outer
        if binding is not None:
            _binding.set(binding.outer)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__()

    def __call__(self, function: _Function) -> _Function:
        """As a decorator, run each call of ``function`` inside the block.

        ``function`` may also be a coroutine function or a generator function.
        """
        run: Any
        if inspect.isasyncgenfunction(function):

            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return _each_step_async(
                    self._of_call(function, args, kwargs), function(*args, **kwargs)
                )

        elif inspect.isgeneratorfunction(function):

            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return _each_step(self._of_call(function, args, kwargs), function(*args, **kwargs))

        elif iscoroutinefunction(function):

            @wraps(function)
            async def run(*args: Any, **kwargs: Any) -> Any:
                with self._of_call(function, args, kwargs):
                    return await function(*args, **kwargs)

        else:

            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                with self._of_call(function, args, kwargs):
                    return function(*args, **kwargs)

        return cast("_Function", run)


class bound(_Block):  # used like a function
    """Within the ``with`` or ``async with`` block, bind shard keys to values.

    ::

        with bound(tenant=request.tenant):
            Case.objects.count()  # the cases of the tenant
            Case.objects.create(title="…")  # a case of the tenant

    In the block, each query of a model with this shard key is filtered by the key, as by
    ``filter(tenant=…)``, and the key is set on each new row. A query or row with a different key is
    refused. To use other keys inside the block, use an :class:`unbound` block, or ``scatter()`` for
    one query.

    As a decorator, ``@bound("tenant_id")`` takes the value from the function's argument of that
    name. It decorates functions, coroutine functions and generator functions. While a generator is
    suspended, its caller runs without the binding.

    The binding applies in the current context (:mod:`contextvars`), that is, in the thread or task,
    and in what ``sync_to_async()``, ``asyncio.to_thread()`` and new tasks run. A new thread begins
    without a binding, and so does the code of a module that is imported inside the block. Sends no
    query.

    :param names: names of shard keys that are also names of the decorated function's parameters.
    :param keys: the value of each shard key: a plain value, or the instance that the key refers to.
        The argument's name is the name of the field or its ``attname``, such as ``tenant`` or
        ``tenant_id``.
    :raises InvalidBoundKey: no model has such a shard key, or the value cannot be a key. Raised
        when the block begins.
    :raises BoundKeyMismatch: an outer block binds the key to a different value.
    """

    def __init__(self, *names: str, **keys: Any) -> None:
        if not names and not keys:
            raise InvalidBoundKey(
                "bound() binds nothing: name a shard key and its value, as in bound(user_id=1)."
            )
        self._names = names
        self._given = keys

    def _values_inside(self, outer: _Binding | None) -> Mapping[Field[Any, Any], Any]:
        if self._names:
            raise InvalidBoundKey(
                f"bound({', '.join(map(repr, self._names))}) names arguments of a function that it"
                " decorates. In a with statement give the values, as in bound(user_id=1)."
            )
        values = dict(outer.values) if outer is not None else {}
        for name, given in self._given.items():
            for key in _keys_named(name, given):
                value = prepared_key(key, given)
                if values.setdefault(key, value) != value:
                    raise BoundKeyMismatch(
                        f"{BoundKey(key.attname, value)} inside"
                        f" {BoundKey(key.attname, values[key])}: a block cannot change the key of"
                        " the block around it. Leave that key with sharded_orm.unbound() first."
                    )
                _install_default(key)
        return values

    def _of_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Block:
        if not self._names:
            return self
        arguments = inspect.signature(function).bind(*args, **kwargs)
        arguments.apply_defaults()
        return bound(**{name: arguments.arguments[name] for name in self._names}, **self._given)

    def __call__(self, function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters
        for name in self._names:
            if name not in parameters:
                raise InvalidBoundKey(
                    f"bound({name!r}) takes the key from an argument of that name, and"
                    f" {function.__qualname__}() has none: its parameters are {list(parameters)!r}."
                )
        return super().__call__(function)


class unbound(_Block):  # used like a function
    """Within the ``with`` or ``async with`` block, no key is bound; see :class:`bound`.

    It can also decorate a function. A queryset that was built under a bound key keeps this key,
    also in an ``unbound()`` block.
    """

    def _values_inside(self, outer: _Binding | None) -> Mapping[Field[Any, Any], Any]:
        return {}


def _each_step(block: _Block, generator: Any) -> Iterator[Any]:
    """Yield the items of ``generator``.

    The code of the generator runs inside ``block``. The code that uses the items runs outside.
    """
    step, argument = generator.send, None
    while True:
        with block:
            try:
                item = step(argument)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # the value of "yield from"
        try:
            argument = yield item
            step = generator.send
        except GeneratorExit:
            with block:
                generator.close()
            raise
        except BaseException as exc:
            step, argument = generator.throw, exc


async def _each_step_async(block: _Block, generator: Any) -> AsyncIterator[Any]:
    """Like :func:`_each_step`, for an asynchronous ``generator``."""
    step, argument = generator.asend, None
    while True:
        with block:
            try:
                item = await step(argument)
            except StopAsyncIteration:
                return
        try:
            argument = yield item
            step = generator.asend
        except GeneratorExit:
            with block:
                await generator.aclose()
            raise
        except BaseException as exc:
            step, argument = generator.athrow, exc


def iterate_inside(block: _Block, items: Iterable[Any]) -> Iterator[Any]:
    """Yield ``items``. Each item is computed inside ``block``, but the caller uses it outside."""
    return _each_step(block, (item for item in items))


def iterate_inside_async(block: _Block, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield ``items``. Each item is computed inside ``block``, but the caller uses it outside."""
    return _each_step_async(block, (item async for item in items))


def _keys_named(name: str, given: Any) -> set[Any]:
    """Return the shard key fields that are called ``name`` and can have the value ``given``.

    Shard keys that are generated for each new row are left out. If one were bound, all new rows
    would get the same key.

    :param name: the name of the field or its ``attname``. If it is the name of a foreign key, such
        as ``owner``, plain fields called ``owner_id`` are included.
    :raises InvalidBoundKey: there is no such field.
    """
    all_options = filter(None, map(shard_options, apps.get_models()))
    keys: set[Any] = {options.key for options in all_options if not options.key_is_generated}
    keys.discard(None)
    attnames = {key.attname for key in keys if name in (key.name, key.attname)}
    named = {key for key in keys if key.attname in attnames}
    if not named:
        raise InvalidBoundKey(
            f"bound({name}=…): no model has a shard key {name!r} that can be bound. The keys are"
            f" {sorted({key.attname for key in keys})!r}."
        )
    if not isinstance(given, Model):
        return named
    other = {
        key for key in named if key.is_relation and not isinstance(given, key.remote_field.model)
    }
    if other and not any(key.is_relation for key in named - other):
        models = sorted({key.remote_field.model.__name__ for key in other})
        raise InvalidBoundKey(
            f"bound({name}=…): the shard key refers to {' or '.join(models)}, not to"
            f" {describe(given)}."
        )
    return named - other


def prepared_key(key: Any, value: Any) -> Any:
    """Return ``value`` in the form in which the field ``key`` stores it.

    :param value: a plain value, or the instance to which the shard key refers.
    :raises InvalidBoundKey: the value is None, or cannot be a value of the field.
    """
    what = f"bound({key.name}=…): {key.model._meta.object_name}.{key.name}"
    plain = value
    if isinstance(value, Model):
        plain = getattr(value, key.target_field.attname) if key.is_relation else value.pk
        if plain is None:
            raise InvalidBoundKey(f"{what} is to be {describe(value)}, which is not saved yet.")
    if hasattr(plain, "resolve_expression"):
        raise InvalidBoundKey(f"{what} is to be {plain!r}, which only the database can compute.")
    try:
        prepared = key.get_prep_value(plain)
    except (TypeError, ValueError, ValidationError) as exc:
        raise InvalidBoundKey(f"{what} cannot be {plain!r}: {exc}") from exc
    if prepared is None:
        raise InvalidBoundKey(f"{what} cannot be None. If there is no key, do not enter the block.")
    return prepared


# -- Instances ---------------------------------------------------------------------------


class _DefaultOfKey:
    """Replaces ``get_default()`` of a shard key's field, so that new instances have the bound key.

    The bound key is the shard key that the caller's ``with bound()`` block sets.

    This does not make reads slower. Django calls ``get_default()`` only if the caller of
    ``Model()`` has not set the field, and never for a row from the database.
    """

    def __init__(self, key: Any) -> None:
        self._key = key

    def __call__(self) -> Any:
        key = self._key
        binding = _binding_in_force()
        value = binding.values.get(key) if binding is not None else None
        return type(key).get_default(key) if value is None else value


def _install_default(key: Any) -> None:
    # bound() calls this for each shard key that it sets. So get_default() stays unchanged in
    # projects that never call bound().
    if "get_default" not in key.__dict__:
        key.get_default = _DefaultOfKey(key)
