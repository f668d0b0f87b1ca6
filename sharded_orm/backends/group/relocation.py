"""When connection objects have to look up again where their shard is.

A connection object is made from one snapshot of the topology and lives over its changes.
Each remembers the generation of the snapshot; one comparison per statement tells whether
there is anything to look up. What was begun ends where it was begun: a transaction, the
results of a statement, a session that carries state. Everything else goes on at the new place.
"""

from __future__ import annotations

import threading
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.utils.functional import cached_property

from sharded_orm.backends.group.contract import GroupMember

if TYPE_CHECKING:
    from collections.abc import Mapping

Wrapper = TypeVar("Wrapper", bound=GroupMember)

# Counts the snapshots that this process has used. Only ``runtime`` changes it.
generation = 0

# Of the settings of an alias: what they say beside how to connect.
_ABOUT = ("SHARD", "GENERATION")


def topology_changed() -> None:
    """Another snapshot is in use. Call it when look-ups give the new one already."""
    global generation
    generation += 1


def follow(wrapper: GroupMember) -> None:
    """Let ``wrapper`` connect to where its shard is now, unless something keeps it.

    Called by whatever begins a statement or a transaction, in the thread of the wrapper; in
    any other it does nothing. Costs a look-up without a query, once per snapshot.
    """
    if is_current(wrapper):
        return
    if wrapper._thread_ident != threading.get_ident():
        return
    current = generation  # Before the look-up: a swap in between leads to one more.
    settings = settings_now(wrapper)
    if settings is None:
        return
    if not same_place(wrapper.settings_dict, settings):
        if is_kept(wrapper):
            return
        leave(wrapper)
        wrapper.forget_server()
    wrapper.take_settings(settings, current)


def give_up(wrapper: GroupMember) -> None:
    """Close what is still connected to where the shard was; a transaction is left alone.

    Called where Django closes connections that are of no more use: a session that carries
    state does not outlive a request at the old place.
    """
    settings = settings_now(wrapper)
    if (
        not wrapper._in_atomic_block
        and settings is not None
        and not same_place(wrapper.settings_dict, settings)
    ):
        wrapper.close()


def is_current(wrapper: GroupMember) -> bool:
    """Whether ``wrapper`` is where the topology in use has its shard."""
    return wrapper._generation in (None, generation)


def apart(wrapper: Wrapper, settings: Mapping[str, Any]) -> Wrapper:
    """A connection object with these settings, of no alias: nothing of its thread is changed."""
    kind: Any = type(wrapper)
    copy: Wrapper = kind({k: v for k, v in settings.items() if k != "SHARD"}, wrapper.alias)
    return copy


def settings_now(wrapper: GroupMember) -> dict[str, Any] | None:
    """The settings of where the shard is now; None if the topology has no such shard.

    Usable from any thread.
    """
    try:
        settings: dict[str, Any] = connections.settings[wrapper.follows]
    except KeyError:
        return None
    if wrapper.shard is None:
        return {key: value for key, value in settings.items() if key != "SHARD"}
    return settings


def same_place(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether connections with these settings are alike."""
    return {k: v for k, v in one.items() if k not in _ABOUT} == {
        k: v for k, v in other.items() if k not in _ABOUT
    }


def is_kept(wrapper: GroupMember) -> bool:
    """Whether something that was begun has to end where it is."""
    return bool(
        wrapper._in_atomic_block
        or wrapper._mirrored
        or wrapper.run_on_commit
        or wrapper.transaction_writes is not None
        or (
            wrapper.connection is not None
            and (
                wrapper.autocommit != wrapper.settings_dict["AUTOCOMMIT"] or wrapper.holds_session()
            )
        )
    )


def leave(wrapper: GroupMember) -> None:
    """Close the connection; one with results that are still read is left to those who read."""
    # Looking must not join a transaction of the group, at the place that is left.
    syncing, wrapper._syncing = wrapper._syncing, True
    try:
        if wrapper.connection is None or wrapper.is_idle():
            wrapper.close()
        else:
            wrapper.connection = None
    finally:
        wrapper._syncing = syncing


def forget_cached(wrapper: GroupMember) -> None:
    """Drop what ``wrapper`` remembers of its server, as its version."""
    wrapper.features = wrapper.features_class(wrapper)
    for name in list(vars(wrapper)):
        if isinstance(getattr_static(type(wrapper), name, None), cached_property):
            delattr(wrapper, name)
