"""Connection objects follow their shard to another node when the topology changes.

A connection object (wrapper) is created from one topology and outlives it. Each remembers the
generation of its topology, so one comparison per statement shows whether its place, the settings by
which it connects, must be looked up again. A transaction, results to read and session state end
where they began. Everything else continues at the new place.
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

# The number of topologies that this process has used. Only ``runtime`` changes it.
generation = 0

# Settings that do not affect where or how we connect.
_UNRELATED = ("SHARD", "GENERATION")


def topology_changed() -> None:
    """Count another topology. To be called when look-ups use it already."""
    global generation
    generation += 1


def follow(wrapper: GroupMember) -> None:
    """Let ``wrapper`` connect to where its shard is now, unless it must stay.

    Called before each statement and transaction. Does nothing in a thread that is not the
    wrapper's. Costs a look-up without a query, once per topology.
    """
    if is_current(wrapper):
        return
    if wrapper._thread_ident != threading.get_ident():
        return
    current = generation  # Read first: a swap during the look-up then leads to another one.
    settings = current_settings(wrapper)
    if settings is None:
        return
    if not same_place(wrapper.settings_dict, settings):
        if must_stay(wrapper):
            return
        disconnect(wrapper)
        wrapper.forget_server()
    wrapper.take_settings(settings, current)


def close_relocated(wrapper: GroupMember) -> None:
    """Close ``wrapper`` if its shard has moved. A transaction is left alone.

    Called when Django closes unusable connections, so that session state at the old place does not
    outlive a request.
    """
    settings = current_settings(wrapper)
    if (
        not wrapper._in_atomic_block
        and settings is not None
        and not same_place(wrapper.settings_dict, settings)
    ):
        wrapper.close()


def is_current(wrapper: GroupMember) -> bool:
    """Whether ``wrapper`` has the settings of the topology in use."""
    return wrapper._generation in (None, generation)


def separate_copy(wrapper: Wrapper, settings: Mapping[str, Any]) -> Wrapper:
    """Return a connection object with these settings that is not the thread's for its alias."""
    kind: Any = type(wrapper)
    copy: Wrapper = kind({k: v for k, v in settings.items() if k != "SHARD"}, wrapper.alias)
    return copy


def current_settings(wrapper: GroupMember) -> dict[str, Any] | None:
    """Return the settings for ``wrapper`` in the topology in use; None if it has no such shard.

    Usable from any thread.
    """
    try:
        settings: dict[str, Any] = connections.settings[wrapper.topology_alias]
    except KeyError:
        return None
    if wrapper.shard is None:
        return {key: value for key, value in settings.items() if key != "SHARD"}
    return settings


def same_place(settings: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether connections with these settings are alike."""
    return {k: v for k, v in settings.items() if k not in _UNRELATED} == {
        k: v for k, v in other.items() if k not in _UNRELATED
    }


def must_stay(wrapper: GroupMember) -> bool:
    """Whether a transaction, hooks of it, or session state must end at the present place."""
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


def disconnect(wrapper: GroupMember) -> None:
    """Close the connection; one with results to read is left to its cursors."""
    # is_idle() must not join a transaction of the group at the old place.
    syncing, wrapper._syncing = wrapper._syncing, True
    try:
        if wrapper.connection is None or wrapper.is_idle():
            wrapper.close()
        else:
            wrapper.connection = None
    finally:
        wrapper._syncing = syncing


def forget_cached(wrapper: GroupMember) -> None:
    """Drop cached facts about the server, such as its version."""
    wrapper.features = wrapper.features_class(wrapper)
    for name in list(vars(wrapper)):
        if isinstance(getattr_static(type(wrapper), name, None), cached_property):
            delattr(wrapper, name)
