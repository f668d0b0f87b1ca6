"""Group transactions: opened at a shard's first use, ended together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError, atomic

from sharded_orm.backends.features import features_of
from sharded_orm.exceptions import GroupAliasError, PartialCommitError
from tests.versions import SAVEPOINT

from .conftest import GROUP, Shards


class Boom(Exception):
    pass


def test_autocommit_outside_of_a_block(shards: Shards) -> None:
    shards.add(0, 1)
    assert shards.rows(0) == [1]
    assert shards.group.open_transactions() == frozenset()


def test_commits_all_shards_it_touched(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(1, 2)
        assert shards.group.open_transactions() == {shards.alias(0), shards.alias(1)}
        assert shards.rows(0) == shards.rows(1) == []
    assert (shards.rows(0), shards.rows(1)) == ([1], [2])
    assert shards.group.open_transactions() == frozenset()
    assert shards[0].get_autocommit()


def test_a_shard_may_be_connected_before_its_first_statement(shards: Shards) -> None:
    """CaptureQueriesContext and assertNumQueries() do this in a test case."""
    with pytest.raises(Boom), atomic(using=GROUP):
        shards[0].close()
        shards[0].ensure_connection()
        shards.add(0, 1)
        assert shards.group.open_transactions() == {shards.alias(0)}
        raise Boom
    assert shards.rows(0) == []


def test_rolls_back_all_shards_on_an_exception(shards: Shards) -> None:
    with pytest.raises(Boom), atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(1, 2)
        raise Boom
    assert shards.rows(0) == shards.rows(1) == []
    shards.add(0, 3)
    assert shards.rows(0) == [3]


def test_nested_block_rolls_back_alone(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        with pytest.raises(Boom), atomic(using=GROUP):
            shards.add(0, 2)
            shards.add(1, 3)  # first used in the nested block
            raise Boom
        shards.add(1, 4)
        with atomic(using=GROUP):
            shards.add(2, 5)
    assert (shards.rows(0), shards.rows(1), shards.rows(2)) == ([1], [4], [5])


def test_block_of_a_shard_inside_the_groups(shards: Shards) -> None:
    with atomic(using=GROUP):
        with atomic(using=shards.alias(0)):
            shards.add(0, 1)
        with pytest.raises(Boom), atomic(using=shards.alias(0)):
            shards.add(0, 2)
            raise Boom
        assert shards.rows(0) == []
    assert shards.rows(0) == [1]


def test_block_of_a_shard_inside_is_rolled_back_with_the_groups(shards: Shards) -> None:
    with pytest.raises(Boom), atomic(using=GROUP):
        with atomic(using=shards.alias(0)):
            shards.add(0, 1)
        raise Boom
    assert shards.rows(0) == []


def test_groups_block_inside_that_of_a_shard(shards: Shards) -> None:
    with atomic(using=shards.alias(0)):
        shards.add(0, 1)
        with pytest.raises(Boom), atomic(using=GROUP):
            shards.add(0, 2)
            shards.add(1, 3)
            raise Boom
        with atomic(using=GROUP):
            shards.add(0, 4)
            shards.add(1, 5)
        assert shards.rows(0) == []
        assert shards.rows(1) == [5]
    assert shards.rows(0) == [1, 4]


def test_durable_blocks(shards: Shards) -> None:
    with atomic(using=GROUP, durable=True):
        shards.add(0, 1)
        with pytest.raises(RuntimeError, match="durable"), atomic(shards.alias(1), durable=True):
            pass
    with (
        atomic(using=shards.alias(0)),
        atomic(using=GROUP, durable=True),
        pytest.raises(RuntimeError, match="durable"),
    ):
        shards.add(0, 2)
    assert shards.rows(0) == [1]


def test_durable_block_directly_inside_that_of_a_test_case(shards: Shards) -> None:
    outer = atomic(using=GROUP)
    outer._from_testcase = True  # type: ignore[attr-defined]
    with outer:
        with atomic(using=shards.alias(0), durable=True):
            shards.add(0, 1)
        with atomic(using=GROUP, durable=True):
            shards.add(0, 2)
        transaction.set_rollback(True, using=GROUP)
    assert shards.rows(0) == []


def test_error_on_one_shard_breaks_the_whole_block(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        with pytest.raises(IntegrityError), atomic(using=shards.alias(1), savepoint=False):
            shards.add(1, 1)
            shards.add(1, 1)
        assert transaction.get_rollback(using=GROUP)
        for number in (0, 1, 2):
            with pytest.raises(TransactionManagementError):
                shards.add(number, 2)
    assert shards.rows(0) == shards.rows(1) == []


def test_error_inside_a_savepoint_is_undone_there(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        with pytest.raises(IntegrityError), atomic(using=GROUP):
            shards.add(1, 1)
            shards.add(1, 1)
        shards.add(1, 2)
    assert (shards.rows(0), shards.rows(1)) == ([1], [2])


@pytest.mark.parametrize("fails_in", ["outer", "both"])
def test_savepoints_of_several_shards_are_undone_together(shards: Shards, fails_in: str) -> None:
    """The blocks of single shards end one by one, while another shard is still to be rolled back."""
    first, second = shards.alias(0), shards.alias(1)
    with atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(1, 1)
        with atomic(using=first), atomic(using=second):
            shards.add(0, 2)
            shards.add(1, 2)
            transaction.set_rollback(True, using=first)
            transaction.set_rollback(fails_in == "both", using=second)
        assert not transaction.get_rollback(using=GROUP)
        shards.add(0, 3)
        shards.add(1, 3)
    assert shards.rows(0) == [1, 3]
    assert shards.rows(1) == ([1, 3] if fails_in == "both" else [1, 2, 3])


def test_an_error_inside_savepoints_of_several_shards_is_undone_there(shards: Shards) -> None:
    first, second = shards.alias(0), shards.alias(1)
    with atomic(using=GROUP):
        shards.add(0, 1)
        with (
            pytest.raises(IntegrityError),
            atomic(using=first),
            atomic(using=second),
            atomic(using=first, savepoint=False),
        ):
            shards.add(1, 1)
            shards.add(0, 1)
        shards.add(0, 2)
        shards.add(1, 2)
    assert (shards.rows(0), shards.rows(1)) == ([1, 2], [2])


def test_set_rollback_on_the_group_and_on_a_shard(shards: Shards) -> None:
    for alias in (GROUP, shards.alias(1)):
        with atomic(using=GROUP):
            shards.add(0, 1)
            shards.add(1, 1)
            transaction.set_rollback(True, using=alias)
        assert shards.rows(0) == shards.rows(1) == []
    with atomic(using=GROUP):
        shards.add(0, 1)
        transaction.set_rollback(True, using=shards.alias(0))
        transaction.set_rollback(False, using=GROUP)
        shards.add(0, 2)
    assert shards.rows(0) == [1, 2]


def test_a_shard_connects_once(shards: Shards) -> None:
    for number in (0, 1):
        shards[number].close()
    connected: list[str] = []

    def note(connection: Any, **kwargs: Any) -> None:
        connected.append(connection.alias)

    with connected_signal(note), atomic(using=GROUP):
        shards[0].ensure_connection()
        shards.add(1, 1)
    assert [alias for alias in connected if alias != GROUP] == [shards.alias(0), shards.alias(1)]


@contextmanager
def connected_signal(receiver: Any) -> Iterator[None]:
    connection_created.connect(receiver)
    try:
        yield
    finally:
        connection_created.disconnect(receiver)


def test_savepoints_by_hand(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        sid = getattr(transaction, SAVEPOINT)(using=GROUP)
        shards.add(0, 2)
        shards.add(1, 3)
        transaction.savepoint_rollback(sid, using=GROUP)
        shards.add(1, 4)
        transaction.savepoint_commit(sid, using=GROUP)
    assert (shards.rows(0), shards.rows(1)) == ([1], [4])


END_SAVEPOINT = [transaction.savepoint_rollback, transaction.savepoint_commit]


def _end_released_savepoint(shards: Shards, using: str, end: Any) -> None:
    """Call ``end`` for a savepoint that is released already, and go on after the error."""
    sid = getattr(transaction, SAVEPOINT)(using=using)
    shards.add(0, 2)
    transaction.savepoint_commit(sid, using=using)
    with pytest.raises(OperationalError, match=r"(?i)savepoint"):
        end(sid, using=using)


@pytest.mark.parametrize("end", END_SAVEPOINT)
@pytest.mark.parametrize("alias", [GROUP, f"{GROUP}_00000"])
def test_a_released_savepoint_ends_the_transaction_as_on_one_database(
    shards: Shards, alias: str, end: Any
) -> None:
    """The alias of a shard is the one database. Only PostgreSQL rolls everything back."""
    ends = features_of(shards[0]).errors_end_transactions
    ran: list[int] = []
    # One database answers COMMIT by a rollback without an error. A group raises it.
    refusal = pytest.raises(TransactionManagementError, match="block of its own")
    with refusal if ends and alias == GROUP else nullcontext(), atomic(using=alias):
        shards.add(0, 1)
        if alias == GROUP:
            shards.add(1, 1)
        _end_released_savepoint(shards, alias, end)
        transaction.on_commit(lambda: ran.append(1), using=alias)
        for number in (0, 2) if alias == GROUP else (0,):
            with pytest.raises(DatabaseError) if ends else nullcontext():
                shards.add(number, 3)
    assert shards.rows(0) == ([] if ends else [1, 2, 3])
    if alias == GROUP:
        assert (shards.rows(1), shards.rows(2)) == (([], []) if ends else ([1], [3]))
        assert ran == ([] if ends else [1])
    with atomic(using=alias):
        shards.add(0, 4)
    assert shards.rows(0)[-1] == 4


@pytest.mark.parametrize("end", END_SAVEPOINT)
@pytest.mark.parametrize("alias", [GROUP, f"{GROUP}_00000"])
def test_a_released_savepoint_in_an_inner_block(shards: Shards, alias: str, end: Any) -> None:
    ends = features_of(shards[0]).errors_end_transactions
    with atomic(using=alias):
        shards.add(0, 1)
        # The block cannot release its own savepoint, so its end raises an error.
        with pytest.raises(DatabaseError) if ends else nullcontext(), atomic(using=alias):
            _end_released_savepoint(shards, alias, end)
        shards.add(0, 5)
        outer = getattr(transaction, SAVEPOINT)(using=alias)
        _end_released_savepoint_again(shards, alias, end)
        transaction.savepoint_rollback(outer, using=alias)
        shards.add(0, 6)
    assert shards.rows(0) == ([1, 5, 6] if ends else [1, 2, 5, 6])


def _end_released_savepoint_again(shards: Shards, using: str, end: Any) -> None:
    sid = getattr(transaction, SAVEPOINT)(using=using)
    shards.add(0, 7)
    transaction.savepoint_commit(sid, using=using)
    for _ in range(2):
        with pytest.raises(DatabaseError):
            end(sid, using=using)


def test_a_released_savepoint_in_a_transaction_by_hand(shards: Shards) -> None:
    ends = features_of(shards[0]).errors_end_transactions
    transaction.set_autocommit(False, using=GROUP)
    try:
        shards.add(0, 1)
        _end_released_savepoint(shards, GROUP, transaction.savepoint_rollback)
        if ends:
            with pytest.raises(DatabaseError):
                getattr(transaction, SAVEPOINT)(using=GROUP)
                shards.add(0, 3)
        transaction.rollback(using=GROUP)
        shards.add(0, 4)
        transaction.commit(using=GROUP)
    finally:
        transaction.set_autocommit(True, using=GROUP)
    assert shards.rows(0) == [4]


def test_manual_transactions(shards: Shards) -> None:
    transaction.set_autocommit(False, using=GROUP)
    try:
        shards.add(0, 1)
        assert shards.rows(0) == []
        transaction.commit(using=GROUP)
        shards.add(0, 2)
        shards.add(1, 2)
        transaction.rollback(using=GROUP)
        with atomic(using=GROUP):
            shards.add(1, 3)
        assert shards.rows(1) == []
        transaction.commit(using=GROUP)
    finally:
        transaction.set_autocommit(True, using=GROUP)
    assert (shards.rows(0), shards.rows(1)) == ([1], [3])
    shards.add(0, 9)
    assert shards.rows(0) == [1, 9]


@pytest.mark.parametrize("alias", [GROUP, f"{GROUP}_00000"])
def test_autocommit_switched_on_in_a_transaction(shards: Shards, alias: str) -> None:
    """The alias of a shard is the one database. Only the driver of PostgreSQL refuses it."""
    commits = shards[0].vendor != "postgresql"
    transaction.set_autocommit(False, using=alias)
    transaction.set_autocommit(True, using=alias)
    transaction.set_autocommit(False, using=alias)
    try:
        shards.add(0, 1)
        refusal = pytest.raises(ProgrammingError, match=r"(?i)autocommit")
        with nullcontext() if commits else refusal:
            transaction.set_autocommit(True, using=alias)
        assert transaction.get_autocommit(using=alias) is commits
    finally:
        # Without this the shard keeps its locks, and the end of the test waits for them.
        if not transaction.get_autocommit(using=alias):
            transaction.rollback(using=alias)
            transaction.set_autocommit(True, using=alias)
    assert shards.rows(0) == ([1] if commits else [])
    shards.add(0, 2)
    assert 2 in shards.rows(0)


def test_commit_and_rollback_of_a_shard_are_forbidden_inside(shards: Shards) -> None:
    with atomic(using=GROUP):
        for forbidden in (transaction.commit, transaction.rollback):
            with pytest.raises(TransactionManagementError):
                forbidden(using=shards.alias(0))
        with pytest.raises(TransactionManagementError):
            transaction.set_autocommit(False, using=shards.alias(0))


def _break_commit(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit() -> None:
        raise OperationalError("the node is gone")

    monkeypatch.setattr(wrapper, "_commit", commit)


def test_partial_commit_names_the_shards(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    _break_commit(shards[1], monkeypatch)
    with pytest.raises(PartialCommitError) as caught, atomic(using=GROUP):
        for number in range(3):
            shards.add(number, 1)
            transaction.on_commit(lambda n=number: ran.append(n), using=shards.alias(number))
        transaction.on_commit(lambda: ran.append(99), using=GROUP)
    assert caught.value.committed == (shards.alias(0),)
    assert caught.value.not_committed == (shards.alias(1), shards.alias(2))
    assert [shards.rows(n) for n in range(3)] == [[1], [], []]
    # Its rows are committed, so its hook ran; the others' must not.
    assert ran == [0]
    monkeypatch.undo()
    with atomic(using=GROUP):
        shards.add(1, 5)
    assert shards.rows(1) == [5]


def test_failed_first_commit_is_the_original_error(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_commit(shards[0], monkeypatch)
    with pytest.raises(OperationalError, match="the node is gone") as caught, atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(1, 1)
    assert not isinstance(caught.value, PartialCommitError)
    assert shards.rows(0) == shards.rows(1) == []


def test_failed_release_breaks_the_outer_block(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release(sid: str) -> None:
        raise OperationalError("no such savepoint")

    with atomic(using=GROUP):
        with pytest.raises(DatabaseError), atomic(using=GROUP):
            shards.add(0, 1)
            shards.add(1, 1)
            monkeypatch.setattr(shards[1], "_savepoint_commit", release)
        monkeypatch.undo()
        # Shard 0 has released its savepoint already.
        assert transaction.get_rollback(using=GROUP)
    assert shards.rows(0) == shards.rows(1) == []


def _fail_to_release(shards: Shards, monkeypatch: pytest.MonkeyPatch, failed: int) -> list[str]:
    """Set two savepoints of the group and write after them. The release of one fails on shard 1.

    :param failed: 0 for the outer savepoint, 1 for the inner.
    :returns: both savepoints.
    """
    shards.add(0, 1)
    sids = [getattr(transaction, SAVEPOINT)(using=GROUP) for _ in range(2)]
    shards.add(0, 2)
    shards.add(1, 2)
    wrapper = shards[1]
    release = wrapper._savepoint_commit

    def fail(sid: str) -> None:
        monkeypatch.setattr(wrapper, "_savepoint_commit", release)
        raise OperationalError("no such savepoint")

    monkeypatch.setattr(wrapper, "_savepoint_commit", fail)
    with pytest.raises(OperationalError, match="no such"):
        transaction.savepoint_commit(sids[failed], using=GROUP)
    assert not transaction.get_rollback(using=GROUP)
    return sids


@pytest.mark.parametrize("inner", [False, True])
def test_a_rollback_after_a_failed_release_stores_nothing(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, inner: bool
) -> None:
    """The program catches both errors. Shard 0 has no savepoint any more to roll back to."""
    with atomic(using=GROUP):
        sids = _fail_to_release(shards, monkeypatch, failed=0)
        with pytest.raises(OperationalError, match="outer block"):
            transaction.savepoint_rollback(sids[inner], using=GROUP)
        with pytest.raises(TransactionManagementError):
            shards.add(0, 3)
    assert shards.rows(0) == shards.rows(1) == []


def test_a_rollback_to_a_savepoint_outside_of_a_failed_release(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    with atomic(using=GROUP):
        sids = _fail_to_release(shards, monkeypatch, failed=1)
        transaction.savepoint_rollback(sids[0], using=GROUP)
        shards.add(1, 3)
    assert (shards.rows(0), shards.rows(1)) == ([1], [3])


def test_on_commit_runs_in_order_after_the_last_commit(shards: Shards) -> None:
    ran: list[tuple[str, list[int], list[int]]] = []

    def hook(name: str) -> Any:
        return lambda: ran.append((name, shards.rows(0), shards.rows(1)))

    with atomic(using=GROUP):
        shards.add(1, 2)
        transaction.on_commit(hook("shard 1"), using=shards.alias(1))
        transaction.on_commit(hook("group"), using=GROUP)
        transaction.on_commit(hook("shard 0"), using=shards.alias(0))
        shards.add(0, 1)
        assert ran == []
    assert ran == [("shard 1", [1], [2]), ("group", [1], [2]), ("shard 0", [1], [2])]
    transaction.on_commit(hook("now"), using=shards.alias(0))
    assert ran[-1][0] == "now"


def test_on_commit_is_dropped_with_its_savepoint(shards: Shards) -> None:
    ran: list[str] = []
    with atomic(using=GROUP):
        with pytest.raises(Boom), atomic(using=GROUP):
            transaction.on_commit(lambda: ran.append("a"), using=shards.alias(0))
            transaction.on_commit(lambda: ran.append("b"), using=GROUP)
            raise Boom
        with pytest.raises(Boom), atomic(using=shards.alias(0)):
            transaction.on_commit(lambda: ran.append("c"), using=shards.alias(0))
            raise Boom
        transaction.on_commit(lambda: ran.append("d"), using=shards.alias(0))
    assert ran == ["d"]
    with pytest.raises(Boom), atomic(using=GROUP):
        transaction.on_commit(lambda: ran.append("e"), using=shards.alias(0))
        raise Boom
    with atomic(using=GROUP):
        shards.add(0, 1)
    assert ran == ["d"]


def test_robust_hooks(shards: Shards, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise Boom

    with atomic(using=GROUP):
        transaction.on_commit(fail, using=shards.alias(0), robust=True)
        transaction.on_commit(lambda: ran.append("after"), using=shards.alias(0))
    assert ran == ["after"]
    assert "Error calling" in caplog.text
    with pytest.raises(Boom), atomic(using=GROUP):
        shards.add(0, 1)
        transaction.on_commit(fail, using=shards.alias(0))
    assert shards.rows(0) == [1]


def test_hook_of_a_shard_whose_own_block_is_outside(shards: Shards) -> None:
    ran: list[str] = []
    with atomic(using=shards.alias(0)):
        with atomic(using=GROUP):
            transaction.on_commit(lambda: ran.append("outer"), using=shards.alias(0))
            transaction.on_commit(lambda: ran.append("group"), using=shards.alias(1))
        assert ran == ["group"]
    assert ran == ["group", "outer"]


def test_hook_that_uses_shards_runs_in_autocommit(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        transaction.on_commit(lambda: shards.add(0, 2), using=shards.alias(0))
    assert shards.rows(0) == [1, 2]
    assert shards.group.open_transactions() == frozenset()


def test_select_for_update_knows_that_it_is_in_a_transaction(shards: Shards) -> None:
    assert shards[0].get_autocommit()
    with atomic(using=GROUP):
        assert not shards[0].get_autocommit()
        assert shards[0].in_atomic_block
        assert len(shards[1].atomic_blocks) == 1


def test_closing_a_shard_inside_a_block(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(1, 1)
        shards[0].close()
        with pytest.raises(DatabaseError):
            shards.add(0, 2)
        with pytest.raises(TransactionManagementError):
            shards.add(1, 2)
    assert shards.rows(0) == shards.rows(1) == []
    shards.add(0, 3)
    assert shards.rows(0) == [3]


def test_closing_the_group_inside_a_block(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        with pytest.raises(Boom), atomic(using=GROUP):
            shards.add(1, 1)
            connections.close_all()
            for number in (0, 1, 2):
                with pytest.raises(DatabaseError):
                    shards.add(number, 2)
            raise Boom
        with pytest.raises(DatabaseError):
            shards.add(2, 2)
    assert [shards.rows(n) for n in range(3)] == [[], [], []]
    with atomic(using=GROUP):
        shards.add(0, 3)
    assert shards.rows(0) == [3]


def test_misnested_blocks_are_refused(shards: Shards) -> None:
    inner = atomic(using=shards.alias(0))
    with pytest.raises(TransactionManagementError, match="still open"), atomic(using=GROUP):
        inner.__enter__()
        shards.add(0, 1)
    inner.__exit__(None, None, None)
    assert shards.rows(0) == []
    shards.add(0, 2)
    assert shards.rows(0) == [2]


def test_missing_shard_does_not_break_the_block(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        with pytest.raises(OperationalError, match=r"photos_00007|_007"):
            shards.add(7, 1)
    assert shards.rows(0) == [1]


def test_group_has_no_sql(shards: Shards) -> None:
    with pytest.raises(GroupAliasError, match="photos_00000"):
        shards.group.cursor()
    with atomic(using=GROUP), pytest.raises(GroupAliasError):
        shards.group.cursor()


def test_a_transaction_ends_with_a_connection_that_is_lost_before_the_commit(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OperationalError("the server is down")

    with monkeypatch.context() as patches:
        with pytest.raises(DatabaseError), atomic(using=shards.alias(0)):
            shards.add(0, 1)
            for method in ("_commit", "_rollback", "get_new_connection"):
                patches.setattr(shards[0], method, fail)
        assert shards[0].connection is None
        assert shards.group.open_transactions() == set()
        with pytest.raises(DatabaseError):
            shards.add(0, 2)
        assert not shards.group.is_in_transaction()
    with atomic(using=shards.alias(0)):
        shards.add(0, 3)
        assert shards.group.is_in_transaction()
    assert shards.rows(0) == [3]


def test_a_transaction_ends_with_a_connection_that_is_closed_inside_it(shards: Shards) -> None:
    with atomic(using=shards.alias(0)):
        shards.add(0, 1)
        shards[0].close()
        assert shards.group.is_in_transaction()
    assert shards.group.open_transactions() == set()
    assert shards.rows(0) == []
