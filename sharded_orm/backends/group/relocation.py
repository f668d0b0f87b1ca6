"""Makes connection objects go to another node when a new topology (the map of shards to nodes) has
their shard there.

A connection object (wrapper) gets its settings from one topology, and may still exist when a new
topology is published. The wrapper remembers the number of its topology, the generation. Before each
statement, it compares this number with the present one. Only if they differ, its settings are
looked up again. A transaction, unread results and session state stay on the old node until they
end. All other work continues on the new node.
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

# The number of the topology (the map of shards to nodes) that this process uses now. For each new
# topology, the module ``runtime`` calls topology_changed(), which adds 1.
generation = 0

# Settings that :func:`same_place` does not compare, because they do not influence to which database
# a connection object connects, or how.
_UNRELATED = ("SHARD", "GENERATION")


def topology_changed() -> None:
    """Increase the number of the present topology (the map of shards to nodes) by 1.

    Must be called after the new topology is in use, so that a lookup already finds the new settings.
    """
    global generation
    generation += 1


def follow(wrapper: GroupMember) -> None:
    """Give the connection object ``wrapper`` the settings of the present topology (the map of
    shards to nodes).

    If the wrapper's shard has moved to another node, the connection to the old node is closed. But
    nothing happens while a transaction or session state still has to end on the old node, or if
    another thread owns the wrapper. Called before each statement and transaction. Costs one lookup
    in memory per new topology, and no query.
    """
    if is_current(wrapper):
        return
    if wrapper._thread_ident != threading.get_ident():
        return
    # Read the number before the settings. If the topology changes between the two, the wrapper gets
    # new settings with an old number. Then the next statement only looks them up once more. In the
    # other order, it would keep old settings.
    current = generation
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
    """Close ``wrapper`` if its shard has moved to another node and no atomic block is open.

    Session state, such as a user variable, keeps a connection on the old node, but only until the
    end of the request. This function is called then, when Django closes unusable connections.
    """
    settings = current_settings(wrapper)
    if (
        not wrapper._in_atomic_block
        and settings is not None
        and not same_place(wrapper.settings_dict, settings)
    ):
        wrapper.close()


def is_current(wrapper: GroupMember) -> bool:
    """Whether the connection object ``wrapper`` has the settings of the present topology (the map of
    shards to nodes).

    Also True if its settings do not come from a topology.
    """
    return wrapper._generation in (None, generation)


def separate_copy(wrapper: Wrapper, settings: Mapping[str, Any]) -> Wrapper:
    """Return a new connection object with the alias of ``wrapper``.

    It is not added to the thread's connections, and belongs to no shard group.

    :param settings: the settings with which the new object connects.
    """
    kind: Any = type(wrapper)
    copy: Wrapper = kind({k: v for k, v in settings.items() if k != "SHARD"}, wrapper.alias)
    return copy


def current_settings(wrapper: GroupMember) -> dict[str, Any] | None:
    """Return the settings that the present topology (the map of shards to nodes) has for the
    connection object ``wrapper``.

    Return None if that topology lacks the wrapper's shard. Usable from any thread.
    """
    try:
        settings: dict[str, Any] = connections.settings[wrapper.topology_alias]
    except KeyError:
        return None
    if wrapper.shard is None:
        return {key: value for key, value in settings.items() if key != "SHARD"}
    return settings


def same_place(settings: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether connections with ``settings`` and with ``other`` lead to the same database, with the
    same options.
    """
    return {k: v for k, v in settings.items() if k not in _UNRELATED} == {
        k: v for k, v in other.items() if k not in _UNRELATED
    }


def must_stay(wrapper: GroupMember) -> bool:
    """Whether the connection object ``wrapper`` has to stay on its present node for now.

    True if it has a transaction, session state, or ``on_commit`` functions that wait for the end of
    a transaction.
    """
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
    """Close the connection of ``wrapper``. If cursors still have results to read, keep the
    connection open for them, but make ``wrapper`` forget it.

    A forgotten connection is closed when its cursors have been closed or dropped.
    """
    # is_idle() reads attributes that make the shard join its group's transaction. That must not
    # happen on the old node, so prevent it by _syncing.
    syncing, wrapper._syncing = wrapper._syncing, True
    try:
        if wrapper.connection is None or wrapper.is_idle():
            wrapper.close()
        else:
            wrapper.connection = None
    finally:
        wrapper._syncing = syncing


def forget_cached(wrapper: GroupMember) -> None:
    """Drop the facts about the server that ``wrapper`` has cached, such as the version."""
    wrapper.features = wrapper.features_class(wrapper)
    for name in list(vars(wrapper)):
        if isinstance(getattr_static(type(wrapper), name, None), cached_property):
            delattr(wrapper, name)
