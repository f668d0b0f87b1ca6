"""Finds the shard keys of a query whose conditions contain no shard key.

For example, a query has only the condition ``email = "a@b.c"``, and a lookup table stores the shard
key for each email address. Such a table is a source of keys: it finds a row's shard key by a value
in another column. The query is given as a recording: the calls of its queryset, which are not
compiled yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_orm import runtime
from sharded_orm.models.moves.scatter import keys_left_out
from sharded_orm.models.plans.shapes import Recording
from sharded_orm.models.querysets.route import PLAIN_KEYS
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.key_sources import KeyGuess
from sharded_orm.topology.model import Shard


class ValueKeys:
    """Finds the shard keys for the ``column = value`` conditions of one query. Not thread-safe.

    It queries the sources of keys. Each of them finds a row's shard key by a value in another
    column.

    The conditions of the query are joined by AND, so each row of the query meets all of them. So it
    is enough to find the shard keys of the rows that meet one condition.
    """

    def __init__(self, recording: Recording) -> None:
        self.group, self._model = recording.shape.options.group, recording.shape.options.model
        self._equalities = [
            (part.field, value)
            for part, value in zip(recording.shape.conditions, recording.values, strict=True)
            if part.lookup == "exact" and not part.is_excluded and type(value) in PLAIN_KEYS
        ]
        self._answers: dict[tuple[Any, Any], Sequence[Any] | None] = {}

    def guess(self) -> KeyGuess | None:
        """Return the shard key that the query's row probably has; None if no source has a guess.

        See :func:`~sharded_orm.models.querysets.guesses.guess_of`.
        """
        for field, value in self._equalities:
            key_guess = key_sources.guess(self._model, field, value)
            if key_guess is not None:
                return key_guess
        return None

    def shards(self) -> list[Shard] | None:
        """Return the shards that can have rows of the query; None if they are unknown.

        They are the shards of the keys that a source of keys returns. Each call queries the
        sources.

        While a key moves, a shard may have copies of its rows, which a query must leave out. If the
        result would be a single shard with such copies, return None, because the read of this shard
        would not leave them out.
        """
        self._answers.clear()
        for field, value in self._equalities:
            keys = self.known_keys(self._model, field, [value])
            if keys is None:
                continue
            located = (runtime.locate(self.group, key) for key in keys)
            shards = list({shard.number: shard for shard in located if shard is not None}.values())
            if len(shards) == 1 and shards[0].number in keys_left_out(self.group):
                return None
            return shards
        return None

    def known_keys(self, model: Any, field: Any, values: Sequence[Any]) -> Sequence[Any] | None:
        """Return the shard keys of the rows whose ``field`` has one of ``values``.

        Does what :func:`~sharded_orm.models.sharding.key_sources.known_keys` does, but remembers
        the result for a single value, so that the sources of keys are queried for it only once.
        """
        if len(values) != 1:
            return key_sources.known_keys(model, field, values)
        asked = field, values[0]
        if asked not in self._answers:
            self._answers[asked] = key_sources.known_keys(model, field, values)
        return self._answers[asked]
