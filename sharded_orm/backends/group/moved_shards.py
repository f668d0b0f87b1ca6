"""Repeats a statement on another node if the shard moves to that node while the statement is sent.

During such a move, the shard's tables on the old node are renamed. Then the new topology is
published, and the tables on the new node get their usual names
(:mod:`sharded_orm.backends.schema_move`). A process that does not know the new topology yet sends a
statement to the old node, where it finds no table, and so does nothing. In autocommit, the
statement waits and runs again on the new node. In a transaction, the whole transaction fails.

With a pair of servers, a write may reach the passive side, which refuses it
(:mod:`sharded_orm.backends.side_fence`). Such a write is repeated in the same way, until this side
is active or the topology leads to the other one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from django.apps import apps
from django.db import Error, OperationalError, ProgrammingError
from django.db.backends import utils
from django.db.backends.utils import CursorDebugWrapper, CursorWrapper

from sharded_orm.backends.features import features_of
from sharded_orm.backends.group import relocation
from sharded_orm.backends.missing_parts import is_missing_table
from sharded_orm.backends.schema_move import NAMES
from sharded_orm.exceptions import ShardMoved, SideFenced, TopologyError
from sharded_orm.method_origin import module_of

# Matches a statement that calls a stored procedure. A procedure may commit while it runs, so the
# statement must not be repeated.
_PROCEDURE: Final = re.compile(r"\s*(?:CALL|DO)\b", re.IGNORECASE)
# While a statement waits for the move of its shard, the topology (the map of shards to nodes) is
# loaded again after this many seconds.
_INTERVAL: Final = 0.02
# If the passive side of a pair of servers refuses a write, the pair may just be changing its active
# side, which takes some milliseconds. The write waits for the end of the change, but at most for
# this many seconds, because the process that makes the change may have been paused. After that, the
# topology is loaded.
_SWITCH_WAIT: Final = 0.25
# A write that the passive side of a pair refuses is tried again and again, with growing pauses. A
# pause is _PART of the time since the first attempt, but at least _SHORTEST seconds.
_PART, _SHORTEST = 0.125, 0.005


class TopologyLookup:
    """The functions with which the backends find out on which nodes the shards are now.

    The backends are a lower layer, which does not know the topology (the map of shards to nodes).
    So the package's Django app provides the functions.

    :param refresh: a function that loads the topology from its source. May raise a TopologyError.
    :param patience: a function that returns for how many seconds a statement waits (``MOVE_WAIT``).
    :param is_moving: a function that returns whether shards or keys of a group are moving, or have
        just moved. May send a query.
    """

    def __init__(
        self,
        refresh: Callable[[], None],
        patience: Callable[[], float],
        is_moving: Callable[[str], bool],
    ) -> None:
        self._refresh = refresh
        self.patience = patience
        self.is_moving = is_moving
        self._lock = threading.Lock()
        self._began = 0.0
        self._refused = ""

    def refresh_since(self, moment: float) -> str:
        """Load the topology (the map of shards to nodes). If many threads call this at the same
        time, load it only once for all of them.

        :param moment: a value of ``time.monotonic()``. If another thread has begun to load the
            topology after this moment, use its result.
        :return: the reason if loading has failed; otherwise "".
        """
        with self._lock:
            if self._began <= moment:
                self._began = time.monotonic()
                try:
                    self._refresh()
                    self._refused = ""
                except TopologyError as exc:
                    self._refused = str(exc)
            return self._refused


_lookup: TopologyLookup | None = None


def provide_lookup(lookup: TopologyLookup) -> None:
    """Set the functions with which the backends look up the topology, the map of shards to nodes.

    The package's Django app calls this function.
    """
    global _lookup
    _lookup = lookup


def rows_move(group: str) -> bool:
    """Whether shards or keys of ``group`` are moving now, or have just moved. One query."""
    return _lookup is not None and _lookup.is_moving(group)


class PlaceWait:
    """Lets one statement wait while its shard is moving, until it can be sent again.

    The statement has failed: it found no table, or the passive side of a pair refused its write.

    :param wrapper: a connection object of the shard, or of another shard on the same node.
    :param current: a function that returns the shard's connection settings in the present topology;
        None if the topology lacks the shard.
    """

    def __init__(self, wrapper: Any, current: Callable[[], Mapping[str, Any] | None]) -> None:
        self._wrapper = wrapper
        self._current = current
        self._deadline: float | None = None
        self._last_chance = False
        self._offered: Mapping[str, Any] | None = None

    def next_place(
        self,
        place: Mapping[str, Any],
        *,
        may_wait: bool = True,
        nothing_done: bool = True,
        may_repeat: bool = True,
        is_fenced: bool = False,
    ) -> Mapping[str, Any] | None:
        """Wait until the failed statement can be sent again, and return the connection settings to
        send it with.

        Return None if the shard does not move, so that the table is missing for another reason.
        Costs one load of the topology and one query, both repeated while the shard moves. If the
        active side of a pair changes, a query first waits for the end of that change.

        :param place: the settings with which the statement was sent last.
        :param may_wait: False in a transaction, which cannot go on with another node.
        :param nothing_done: False if the server may have executed a part of the statement.
        :param may_repeat: False if the error has ended the statement's transaction, so that the
            statement cannot be sent again in it.
        :param is_fenced: True if the passive side of a pair of servers has refused the statement.
        :raises ShardMoved: the shard has moved and the statement cannot follow it, or the move
            takes longer than ``MOVE_WAIT``.
        """
        if _lookup is None:
            return None
        if is_fenced and may_wait and nothing_done:
            self._wait_for_switch(_lookup.patience())
        while True:
            refused = _lookup.refresh_since(time.monotonic())
            settings = self._current()
            has_moved = settings is not None and not relocation.same_place(place, settings)
            if not (has_moved or is_fenced or has_hidden_tables(self._wrapper, place)):
                # The shard is not moving (any more): it is on the same node, and its tables have
                # their usual names. But perhaps they got these names only after the statement had
                # failed. So send it once more. If it fails again, the table does not exist.
                if not may_repeat:
                    if rows_move(self._wrapper.shard.group):
                        raise self._cannot_follow(nothing_done=nothing_done)
                    return None
                self._last_chance = not self._last_chance
                return place if self._last_chance else None
            self._last_chance = False
            if not (may_wait and nothing_done):
                raise self._cannot_follow(nothing_done=nothing_done, is_fenced=is_fenced)
            if self._deadline is None:
                self._deadline = time.monotonic() + _lookup.patience()
            elif time.monotonic() > self._deadline:
                raise self._out_of_use(refused, is_fenced=is_fenced)
            if has_moved and settings != self._offered:
                self._offered = settings
                return settings
            self._offered = None
            # Nothing signals that a move has ended, or that a person has repaired an interrupted
            # change of the active side. So look again after a pause.
            time.sleep(self._fenced_interval() if is_fenced else _INTERVAL)
            if is_fenced:
                # Return the same settings: only another attempt shows whether the fence is gone.
                return place

    def _wait_for_switch(self, patience: float) -> None:
        """Wait, by a single query, until the pair of servers has changed its active side.

        Without this query, the refused write would be sent again and again until the change is
        over, which costs the servers processor time.
        """
        left = patience if self._deadline is None else self._deadline - time.monotonic()
        seconds = min(_SWITCH_WAIT, max(0.0, left))
        # Ignore errors here, for example if the server limits the time of statements. If the server
        # is broken, the next attempt of the refused statement will raise the error.
        with suppress(Error):
            self._wrapper.wait_for_side_switch(seconds)

    def _fenced_interval(self) -> float:
        assert _lookup is not None and self._deadline is not None
        waited = time.monotonic() - (self._deadline - _lookup.patience())
        return min(max(waited * _PART, _SHORTEST), _INTERVAL)

    def _cannot_follow(self, *, nothing_done: bool, is_fenced: bool = False) -> ShardMoved:
        moves = f"Shard {self._wrapper.alias!r} has moved to another node, or is moving"
        if is_fenced:
            moves = (
                f"The other server of the pair is the active side of shard {self._wrapper.alias!r}, or"
                " becomes it"
            )
        if nothing_done:
            rest = (
                ", and a transaction cannot follow it. Nothing of the statement was executed. Run the"
                " transaction again."
            )
        else:
            rest = (
                ". A part may have been done already, by executemany() or a procedure. Call it in a"
                " transaction, which can be run again."
            )
        return self._error(moves + rest, is_fenced=is_fenced)

    def _error(self, message: str, *, is_fenced: bool) -> ShardMoved:
        if not is_fenced:
            return ShardMoved(message)
        fenced = SideFenced(message)
        fenced.alias = self._wrapper.alias
        return fenced

    def _out_of_use(self, refused: str, *, is_fenced: bool) -> ShardMoved:
        assert _lookup is not None
        cause, command = "it moves to another node", "move"
        if is_fenced:
            cause, command = "its pair of servers changes the active side", "switch"
        return self._error(
            f"Shard {self._wrapper.alias!r} has been out of use for {_lookup.patience():g} s, because"
            f" {cause}. Try again; if no {command} is under way, end the one that was"
            f" broken off by 'manage.py shards {command} GROUP --repair'."
            + (f" The topology could not be looked up: {refused}" if refused else ""),
            is_fenced=is_fenced,
        )


def place_wait(wrapper: Any) -> PlaceWait:
    """Return an object with which a statement of the shard's connection object ``wrapper`` can wait
    until the shard is usable again.
    """
    return PlaceWait(wrapper, lambda: relocation.current_settings(wrapper))


def has_hidden_tables(wrapper: Any, place: Mapping[str, Any]) -> bool:
    """Whether the tables of a shard are hidden, which means renamed, because the shard moves.

    :param place: the settings of the database in which to look.
    """
    copy = relocation.separate_copy(wrapper, place)
    try:
        return NAMES in copy.introspection.table_names()
    except Error:
        # The schema is missing, so it has no hidden tables. Or the server has failed: then the next
        # attempt of the statement raises the error.
        return False
    finally:
        copy.close()


def refuse_hidden_tables(wrapper: Any) -> None:
    """Raise an error if the shard is moving. Called before a migration. One query.

    While a shard moves, its tables are renamed. A migration would not find them, and would create
    them again.

    :raises ShardMoved: the shard is moving.
    """
    if NAMES in wrapper.introspection.table_names():
        raise ShardMoved(
            f"The tables of {wrapper.alias!r} cannot be created or changed now: the shard moves to"
            " another node, and its tables are hidden. If no move is under way, end the one that was"
            " broken off by 'manage.py shards move GROUP --repair'."
        )


# ##### Cursors #####


class ShardCursor(CursorWrapper):
    """A cursor of a shard's connection object. If the shard has moved to another node, the cursor
    runs its statement there.
    """

    # _execute() and _executemany() override methods of CursorWrapper. CursorWrapper calls them to
    # send a statement, after it has called all functions of execute_wrappers.

    def execute(self, sql: Any, params: Any = None) -> Any:
        if (
            sends_as_django(type(self))
            and next(reversed(self.db.execute_wrappers), None) is None
            and apps.ready
        ):
            # There are no execute_wrappers. CursorWrapper.execute and
            # CursorWrapper._execute_with_wrappers would then only call _execute(), so save the time
            # for them.
            return self._execute(sql, params)
        return super().execute(sql, params)

    def _execute(self, sql: Any, params: Any, *ignored: Any) -> Any:
        wait: PlaceWait | None = None
        db = self.db
        while True:
            try:
                if ignored:  # Django passes further arguments, and execute() does not.
                    return super()._execute(sql, params, *ignored)  # type: ignore[misc]  # missing in Django's type stubs
                # Do the same as CursorWrapper._execute(), but without its context manager for
                # errors, which is faster. If there is an error, the code below converts it.
                db.validate_no_broken_transaction()
                cursor = self.cursor
                try:
                    return cursor.execute(sql) if params is None else cursor.execute(sql, params)
                except BaseException as exc:
                    db.wrap_database_errors.__exit__(type(exc), exc, exc.__traceback__)
                    raise
            except (OperationalError, ProgrammingError) as exc:
                if not self._may_have_moved(exc):
                    raise
                is_fenced = isinstance(exc, SideFenced)
                if _PROCEDURE.match(str(sql)):
                    # The statement calls a stored procedure, which may have committed a part of its
                    # work. So never repeat the statement.
                    self._next_place(
                        self._wait(), may_wait=False, nothing_done=False, is_fenced=is_fenced
                    )
                    raise
                wait = wait or self._wait()
                may_wait = not relocation.must_stay(db)
                may_repeat = may_wait or not features_of(db).errors_end_transactions
                place = self._next_place(
                    wait, may_wait=may_wait, may_repeat=may_repeat, is_fenced=is_fenced
                )
                if place is None:
                    raise
            if not relocation.same_place(place, db.settings_dict):
                self.cursor.close()
                # Continue with a cursor of the new node, to which db.cursor() connects.
                self.cursor = db.cursor().cursor

    # CursorWrapper.__getattr__ would look these methods up in the driver's cursor, at each call.
    # The methods here do the same, and are faster.

    def fetchone(self) -> Any:
        if not _are_looked_up("fetchone"):
            return self._djangos("fetchone")()
        try:
            return self.cursor.fetchone()
        except BaseException as exc:
            self.db.wrap_database_errors.__exit__(type(exc), exc, exc.__traceback__)
            raise

    def fetchall(self) -> Any:
        if not _are_looked_up("fetchall"):
            return self._djangos("fetchall")()
        try:
            return self.cursor.fetchall()
        except BaseException as exc:
            self.db.wrap_database_errors.__exit__(type(exc), exc, exc.__traceback__)
            raise

    def close(self) -> Any:
        return self.cursor.close() if _are_looked_up("close") else self._djangos("close")()

    def _djangos(self, name: str) -> Any:
        """Return the method ``name`` that Django's cursor would use if this class did not override
        it. This is a method that another package has added to Django's cursors, or else the result
        of ``__getattr__``.
        """
        method = getattr(super(), name, None)
        return self.__getattr__(name) if method is None else method

    def _executemany(self, sql: Any, param_list: Any, *ignored: Any) -> Any:
        try:
            return super()._executemany(sql, param_list, *ignored)  # type: ignore[misc]  # missing in Django's type stubs
        except (OperationalError, ProgrammingError) as exc:
            if self._may_have_moved(exc):
                in_transaction = self.db.in_atomic_block
                self._next_place(
                    self._wait(),
                    may_wait=False,
                    nothing_done=in_transaction,
                    is_fenced=isinstance(exc, SideFenced),
                )
            raise

    def _may_have_moved(self, exc: BaseException) -> bool:
        # While the new node is looked up, receivers of connection_created may run statements on
        # this alias. If such a statement fails, do not begin another lookup, because that would
        # never end.
        is_refused = isinstance(exc, SideFenced) or is_missing_table(exc)
        return is_refused and not self.db.looks_for_place

    def _next_place(self, wait: PlaceWait, **how: bool) -> Any:
        self.db.looks_for_place = True
        try:
            return wait.next_place(self.db.settings_dict, **how)
        finally:
            self.db.looks_for_place = False

    def _wait(self) -> PlaceWait:
        return place_wait(self.db)


class ShardDebugCursor(ShardCursor, CursorDebugWrapper):
    """The cursor of a shard while queries are logged."""

    def execute(self, sql: Any, params: Any = None) -> Any:
        return CursorDebugWrapper.execute(self, sql, params)


_EXECUTE, _WRAP, _SEND, _LOOK_UP, _ENTER, _EXIT, _INIT = (
    CursorWrapper.execute, CursorWrapper._execute_with_wrappers, CursorWrapper._execute,  # type: ignore[attr-defined]  # missing in Django's type stubs
    CursorWrapper.__getattr__, CursorWrapper.__enter__, CursorWrapper.__exit__, CursorWrapper.__init__,
)  # fmt: skip
# Whether the methods above are Django's own. False if another package had replaced one of them
# before this module was imported.
_ARE_KNOWN = all(
    module_of(method) == utils.__name__
    for method in (_EXECUTE, _WRAP, _SEND, _LOOK_UP, _ENTER, _EXIT, _INIT)
)
_OF_CURSORS = CursorWrapper.__dict__


def sends_as_django(cursor_class: Any) -> bool:
    """Whether a cursor of this class sends statements by Django's own methods.

    False if another package has replaced these methods, for example to trace statements. Then the
    methods of that package must be called.
    """
    return (
        _ARE_KNOWN
        and CursorWrapper.execute is _EXECUTE
        and cursor_class._execute_with_wrappers is _WRAP
        and CursorWrapper._execute is _SEND  # type: ignore[attr-defined]  # missing in Django's type stubs
    )


def _are_looked_up(name: str) -> bool:
    """Whether Django's cursor looks up the method ``name`` in the driver's cursor, because it has
    no such method itself.

    False if another package has changed that, for example to trace statements. Such a package adds
    a method ``name`` to Django's cursor, or replaces ``__getattr__``. Then its code must be called.
    """
    return (
        _ARE_KNOWN
        and CursorWrapper.__getattr__ is _LOOK_UP
        and not hasattr(CursorDebugWrapper, name)  # a subclass of CursorWrapper
    )


def cursors_only_send() -> bool:
    """Whether a shard's cursor does nothing but send a statement and fetch its rows, because no
    other package has replaced methods of Django's cursors.

    If True, the statement can be sent without a cursor, which is faster. The caller has to test by
    itself that there are no ``execute_wrappers`` and that queries are not logged.
    """
    return (
        _ARE_KNOWN
        and CursorWrapper.execute is _EXECUTE
        and CursorWrapper._execute_with_wrappers is _WRAP  # type: ignore[attr-defined]  # missing in Django's type stubs
        and CursorWrapper._execute is _SEND  # type: ignore[attr-defined]  # missing in Django's type stubs
        and CursorWrapper.__getattr__ is _LOOK_UP
        and CursorWrapper.__enter__ is _ENTER
        and CursorWrapper.__exit__ is _EXIT
        and CursorWrapper.__init__ is _INIT
        and "__new__" not in _OF_CURSORS
        and "__getattribute__" not in _OF_CURSORS
        and "__setattr__" not in _OF_CURSORS
        and "fetchall" not in _OF_CURSORS
        and "fetchone" not in _OF_CURSORS
        and "close" not in _OF_CURSORS
    )
