"""Reads a row by a guess: the shard key that a source of keys remembers for a value of the row.

A source of keys is an object that looks up a row's shard key by a value in another column. A guess
is used only if the value is unique over all shards. If the guessed key's shard returns a row with
the value, it is the right row, and the source need not be queried. If not, the guess may be out of
date. Then the read is repeated with the key that the source returns now.
"""

from __future__ import annotations

from typing import Any

from django.db.models.expressions import Col
from django.db.models.lookups import Exact
from django.db.models.sql import Query

from sharded_orm import runtime
from sharded_orm.models.moves.scatter import keys_left_out
from sharded_orm.models.querysets.route import PLAIN_KEYS, has_one_table
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.expressions import is_known, is_plain_value
from sharded_orm.models.sharding.key_sources import KeyGuess
from sharded_orm.routing.where_clause import compares_as
from sharded_orm.topology.model import Shard


def guess_of(query: Query, *, ordered: bool) -> KeyGuess | None:
    """Return the guess for a query of the form ``column = value AND …``; None for any other query.

    A guess is the shard key of the row that had ``value`` in ``column`` when it was last looked up.
    A source of keys, an object that looks up shard keys by a value, remembers it. Sends nothing.
    """
    model = query.model
    if model is None or not key_sources.has_key_sources():
        return None
    if not has_one_table(query, ordered=ordered):
        return None
    key_guess = None
    lookup: Any
    for lookup in query.where.children:
        if type(getattr(lookup, "lhs", None)) is not Col or not is_known(type(lookup)):
            return None
        if not is_plain_value(lookup.rhs):
            return None
        if key_guess is None and compares_as(Exact, lookup) and type(lookup.rhs) in PLAIN_KEYS:
            key_guess = key_sources.guess(model, lookup.lhs.target, lookup.rhs)
    return key_guess


def shard_of(group: str, key_guess: KeyGuess) -> Shard | None:
    """Return the shard of the guessed key; None if the guess cannot be used.

    It cannot be used in two cases. Either no key is remembered. Or keys are moving, and the shard
    has some of their rows. A row that is found there may then be an outdated copy, which would not
    prove that the guess is right.
    """
    shard = None if key_guess.key is None else runtime.locate(group, key_guess.key)
    if shard is None or shard.number in keys_left_out(group):
        return None
    return shard
