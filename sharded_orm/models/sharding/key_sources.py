"""Sources of keys: objects that find the shard key of a row by a value in another column.

For example, a query has only the condition ``email = "a@b.c"``, and a table in the global database
maps email addresses to shard keys. The sources are used only if the conditions of a query contain
no shard key. A Django app can add a source (:func:`provide_key_source`) once it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from django.db.models import Field, Model

from sharded_orm.routing.where_clause import KeysOfRows


class KeyGuess(Protocol):
    """A guess at the shard key of a row, for example of the only row with the email ``a@b.c``.

    The key comes from an earlier look-up. A key source, which is an object that finds shard keys by
    another column, has remembered it. The guess may be out of date. It is right if the shard of the
    guessed key returns a row with that email.
    """

    @property
    def key(self) -> Any:
        """The guessed shard key, as the database stores it; None if no key is remembered."""

    def forget(self) -> None:
        """Drop the guess, because a query did not find the row on the guessed shard."""


class KeySource(Protocol):
    """A source of keys: an object that finds shard keys by the values of another column."""

    def keys(
        self, model: type[Model], field: Field[Any, Any], values: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return the shard keys of all stored rows whose ``field`` has one of ``values``.

        The result must be complete. For example, ``values`` are "a" and "b", and during the call
        another process changes a row from "a" to "b". The result must contain the key of this row,
        too. It is no problem if the result also contains keys of other rows.

        :param field: a field of the model's own table.
        :param values: values as the database stores them, without None.
        :returns: the keys as the database stores them; None if the source cannot be sure that it
            knows all of them.
        """

    def guess(self, model: type[Model], field: Field[Any, Any], value: Any) -> KeyGuess | None:
        """Return a guess at the shard key of the row with ``value`` in ``field``. Sends no query.

        If the source remembers no key for ``value``, the guess has None as its key.

        :returns: None if the source cannot guess keys by ``field``. For example, several rows,
            perhaps on different shards, may have the same value in it.
        """

    def hint(self, model: type[Model]) -> str:
        """Return a clause for the error message which says that a query has no shard key.

        The clause says why this source has found no shard key for a query of ``model``; "" if the
        source knows no reason.
        """

    def unique_fields(self, model: type[Model]) -> Sequence[Field[Any, Any]]:
        """Return the fields whose values are unique over all shards, and by which queries of
        ``model`` find the shard.
        """


_sources: list[KeySource] = []
# The function that hand_over() sets for the next read of this thread or task. keys_of_read()
# returns it. It is not stored in the queryset, because several threads may evaluate one queryset.
_keys_of_read: ContextVar[KeysOfRows | None] = ContextVar("_keys_of_read", default=None)


def provide_key_source(source: KeySource) -> None:
    """Add a source of keys, which finds the shard keys of rows by another column.

    :func:`known_keys` queries the sources in the order in which they were added.
    """
    _sources.append(source)


def has_key_sources() -> bool:
    return bool(_sources)


def unique_fields(model: type[Model]) -> list[Field[Any, Any]]:
    """Return the fields of ``model`` whose values a source keeps unique over all shards."""
    return [field for source in _sources for field in source.unique_fields(model)]


def known_keys(
    model: type[Model], field: Field[Any, Any], values: Sequence[Any]
) -> Sequence[Any] | None:
    """Return the shard keys of all stored rows whose ``field`` has one of ``values``.

    The sources of keys are queried in turn until one returns the keys. Return None if no source
    can.
    """
    for source in _sources:
        keys = source.keys(model, field, values)
        if keys is not None:
            return keys
    return None


@contextmanager
def hand_over(keys: KeysOfRows) -> Iterator[None]:
    """Pass the function ``keys`` to the next call of :func:`keys_of_read` in the ``with`` block.

    A read queries the sources of keys first. If it then leaves the query to Django, Django's code
    looks for the keys once more. So the read passes a function that returns the keys it has found,
    and the sources are not queried twice. Other threads and tasks are not affected.
    """
    token = _keys_of_read.set(keys)
    try:
        yield
    finally:
        _keys_of_read.reset(token)


def keys_of_read() -> KeysOfRows:
    """Return the function that finds the shard keys of a read.

    This is the function from :func:`hand_over`, or :func:`known_keys` if there is none. The
    function from :func:`hand_over` is returned only once. If the read is repeated because a key has
    moved, the sources of keys are queried again.
    """
    handed_over = _keys_of_read.get()
    if handed_over is None:
        return known_keys
    _keys_of_read.set(None)
    return handed_over


def guess(model: type[Model], field: Field[Any, Any], value: Any) -> KeyGuess | None:
    """Return the guessed shard key from the first source of keys that has a guess, else None.

    For the arguments, see :meth:`KeySource.guess`.
    """
    for source in _sources:
        key_guess = source.guess(model, field, value)
        if key_guess is not None:
            return key_guess
    return None


def hint(model: type[Model]) -> str:
    """Return the end of the error message which says that a query of ``model`` has no shard key.

    It joins the clauses of all sources of keys that know why they have found no key; "" if there
    are none.
    """
    return "".join(f", and {text}" for source in _sources if (text := source.hint(model)))
