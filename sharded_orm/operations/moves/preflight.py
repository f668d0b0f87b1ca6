"""Checks that keys can be moved. They run before a move writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.db import Error, connections
from django.db.models import BinaryField

from sharded_orm import runtime
from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.two_phase.branch import TABLE as DECISIONS
from sharded_orm.backends.write_hooks.followers import followers_of
from sharded_orm.exceptions import MoveRefused
from sharded_orm.models.fields import PackedIDField
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import shard_options, target_field
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.request import KeyToMove
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.shards.status import error_line
from sharded_orm.routing.base import key_routing_of
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.topology.transitions import KeyRouting
from sharded_orm.two_phase.recovery import refuse_prepared

#: Tables on shards that belong to no sharded model but to Django, SQLite or this library. No note
#: warns of them.
_KNOWN_TABLES = frozenset({"django_migrations", "sqlite_sequence", DECISIONS})
#: The number of rows of a key whose ids are looked up on the new shard by one statement.
_BATCH = 500
#: The number of such rows that a sentence names.
_SHOWN = 10
_TAKE_IDS = "Ids of sharded models should come from ticket servers"
_RELAY = (
    "These are rows of mirrors, perhaps under former keys that a relay has not removed yet: run"
    " 'manage.py mirrors relay --once', and move the key again"
)
_ROUTES = {
    KeyRouting.COMPUTED: (
        "computes the shard of a key, so a key cannot move by itself. Move its shard to another node,"
        " or choose the directory strategy for a new group and import the rows"
    ),
}


def check_group(group: str) -> GroupKeys:
    """Check that the configuration and the models of ``group`` allow moves of its keys.

    Sends no query to a shard.

    :raises MoveRefused: keys of the group cannot move. Every reason is listed.
    :raises UnknownShard: there is no such group.
    """
    problems = list(_group_problems(group))
    if problems:
        raise MoveRefused(problems)
    return GroupKeys(group)


def _group_problems(group: str) -> Iterator[str]:
    found = runtime.group(group)
    if not isinstance(runtime.strategy(group), DirectoryStrategy):
        why = _ROUTES.get(
            key_routing_of(found),
            "reads the shard from the key, so a key cannot move by itself. Move its shard to another"
            " node",
        )
        yield f"the strategy {found.strategy!r} of group {group!r} {why}"
        return
    if runtime.config().placement_lease is None:
        yield (
            "SHARDED_ORM has no PLACEMENT_LEASE, so processes remember for good where keys are: set"
            " it (5.0 seconds, say), and restart every process of the site before the first move"
        )
    models = [
        model
        for model in apps.get_models(include_auto_created=True)
        if (options := shard_options(model)) is not None and options.group == group
    ]
    if not models:
        yield f"no model belongs to group {group!r}"
        return
    yield from GroupKeys(group).problems()
    for model in models:
        for pk in model._meta.pk_fields:
            if isinstance(target_field(pk), BinaryField):
                yield (
                    f"the primary key {pk.name!r} of {model._meta.label} has bytes, which the journal of"
                    " changes cannot name: use another primary key"
                )
        for field in model._meta.local_concrete_fields:
            if isinstance(field, PackedIDField):
                yield (
                    f"ids of {model._meta.label} ({field.name!r}) contain the number of their shard,"
                    " so its rows must stay there"
                )


def check_shards(
    group: str, numbers: Iterable[int], tables: Sequence[CapturedTable], sessions: ShardSessions
) -> list[str]:
    """Check that the shards have equal schemas, and that the mover has the necessary privileges.

    Return notes for the operator. Costs some statements per shard.

    :raises MoveRefused: something is missing; every reason is listed.
    :raises BranchesPrepared: a transaction in two phases holds locks on one of the shards.
    """
    shards = [runtime.shard(group, number) for number in sorted(set(numbers))]
    refuse_prepared(runtime.group(group), shards)
    problems: list[str] = []
    notes: list[str] = []
    first: tuple[str, SchemaSnapshot] | None = None
    for shard in shards:
        alias, number = shard.alias, shard.number
        wrapper: Any = connections[alias]
        try:
            snapshot: SchemaSnapshot = wrapper.schema_snapshot()
            sessions.capture(number).check_privileges()
        except MoveRefused as exc:
            problems += exc.problems
            continue
        except Error as exc:
            problems.append(f"{alias} cannot be used: {error_line(exc)}")
            continue
        finally:
            wrapper.close()
        if first is None:
            first = (alias, snapshot)
            notes += _tables_without_model(snapshot, tables)
            continue
        changed = snapshot.changed_tables(first[1])
        if changed != []:
            what = "their defaults" if changed is None else ", ".join(changed)
            problems.append(
                f"the schemas of {first[0]} and {alias} differ ({what}): run 'manage.py migrate_shards'"
                " and 'manage.py shards check'"
            )
    if problems:
        raise MoveRefused(problems)
    return notes


def _tables_without_model(
    snapshot: SchemaSnapshot, tables: Sequence[CapturedTable]
) -> Iterator[str]:
    names = {table.name for table in tables} | _tables_of_shards()
    for name, definition in snapshot.definitions.items():
        is_table = definition.lstrip().upper().startswith("CREATE TABLE")
        if is_table and name not in names and name not in _KNOWN_TABLES:
            yield (
                f"the table {name!r} has no model, so its rows stay where they are. Move them yourself"
                " if they belong to the keys"
            )


def _tables_of_shards() -> set[str]:
    """Return the names of tables on shards whose rows belong to no shard key, and so do not move.

    These are the tables of apps with ``tables_on_shards``, and copies of global rows.
    """
    return {
        model._meta.db_table
        for config in apps.get_app_configs()
        for model in config.get_models()
        if getattr(config, "tables_on_shards", False) or has_copies(model)
    }


def taken_on_target(
    group: str,
    key: KeyToMove,
    stored: Any,
    tables: Sequence[CapturedTable],
    sessions: ShardSessions,
) -> Iterator[str]:
    """Yield sentences about rows of the key that the new shard would refuse, with remedies.

    It would refuse a row if another row there has the same id, or the same value in a unique
    column. Costs two statements per table and 500 rows of the key.
    """
    source, target = sessions.copy(key.source), sessions.copy(key.target)
    read_only = _read_only_tables()
    taken: dict[str, list[str]] = {_TAKE_IDS: [], _RELAY: []}
    for table in tables:
        found = taken[_RELAY if table.name in read_only else _TAKE_IDS]
        last: tuple[Any, ...] = ()
        while True:
            rows = source.read(table, stored, _BATCH, last)
            if rows:
                found += target.taken(table, rows)
                last = source.pk_of(table, rows[-1])
            if len(rows) < _BATCH or len(found) >= _SHOWN:
                break
    alias = runtime.shard(group, key.target).alias
    for remedy, rows_there in taken.items():
        if rows_there:
            yield (
                f"{alias} has ids or unique values of the rows of {str(key.value)!r} already"
                f" ({', '.join(rows_there[:_SHOWN])}). {remedy}"
            )


def _read_only_tables() -> set[str]:
    """Return the tables of mirrors, which repeat the writes of other models."""
    return {
        model._meta.db_table
        for model in apps.get_models(include_auto_created=True)
        if any(
            getattr(follower, "is_read_only", False)
            for follower in followers_of(model, on_shard=True)
        )
    }
