"""Sources that know the shard keys of rows which a query names by another column.

A source is asked only if the conditions of a query contain no shard key. Sources belong to apps of
Django: an app provides its source when it is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from django.db.models import Field, Model


class KeyGuess(Protocol):
    """What a source remembers of the only row that may have a value. It may be out of date.

    The row is where the guess says only if the shard of :attr:`key` answers with it.
    """

    @property
    def key(self) -> Any:
        """The shard key that the row had, as the database stores it; None if it is not remembered."""

    def forget(self) -> None:
        """Note that a query did not find the row."""


class KeySource(Protocol):
    """Knows which shard keys the rows with certain values in a column have."""

    def keys(
        self, model: type[Model], field: Field[Any, Any], values: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return shard keys, among them that of each stored row whose ``field`` has one of ``values``.

        The result is as of one moment: a row that has one value after another is not missed.

        :param field: a field of the model's own table.
        :param values: values as the database stores them, without None.
        :returns: the keys as the database stores them; None if the source does not know them all.
        """

    def guess(self, model: type[Model], field: Field[Any, Any], value: Any) -> KeyGuess | None:
        """Return the guess for the row with ``value``. Sends nothing.

        :returns: None if two rows may have the value at one moment, on whatever shards, or if the source
            does not know.
        """

    def hint(self, model: type[Model]) -> str:
        """Return why a query of ``model`` without a shard key is refused, as a clause; "" if the source
        has nothing to say.
        """


_sources: list[KeySource] = []


def provide_key_source(source: KeySource) -> None:
    """Add a source, which :func:`known_keys` asks after the earlier ones."""
    _sources.append(source)


def has_key_sources() -> bool:
    return bool(_sources)


def known_keys(
    model: type[Model], field: Field[Any, Any], values: Sequence[Any]
) -> Sequence[Any] | None:
    """Return the result of the first source that knows the keys; see :meth:`KeySource.keys`."""
    for source in _sources:
        keys = source.keys(model, field, values)
        if keys is not None:
            return keys
    return None


def guess(model: type[Model], field: Field[Any, Any], value: Any) -> KeyGuess | None:
    """Return the first guess of a source; see :meth:`KeySource.guess`."""
    for source in _sources:
        key_guess = source.guess(model, field, value)
        if key_guess is not None:
            return key_guess
    return None


def hint(model: type[Model]) -> str:
    """Return what the sources say about a query of ``model`` that names no shard key."""
    return "".join(f", and {text}" for source in _sources if (text := source.hint(model)))
