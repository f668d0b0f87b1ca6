"""Nodes queried side by side, with a limit on waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError

from sharded_orm.operations.nodes import MAX_ABANDONED, NoAnswer, ask_nodes, ask_one
from tests.patience import PATIENCE


def test_many_who_ask_at_once_are_all_answered() -> None:
    readers = MAX_ABANDONED + 5
    together = threading.Barrier(readers)

    def read(number: int) -> object:
        return ask_nodes(["busy"], lambda node, alive: together.wait(PATIENCE), patience=PATIENCE)[
            "busy"
        ]

    with ThreadPoolExecutor(readers) as pool:
        found = list(pool.map(read, range(readers)))
    assert sorted(found) == list(range(readers))  # type: ignore[type-var]  # numbers, or it fails


def test_what_hangs_is_not_asked_for_ever() -> None:
    released = threading.Event()
    begun = []

    def hang() -> int:
        begun.append(threading.current_thread())
        released.wait(PATIENCE)
        return 1

    try:
        for _ in range(MAX_ABANDONED):
            with pytest.raises(NoAnswer, match=r"no answer within 0\.001 seconds"):
                ask_one("the hanging", hang, within=0.001)
        with pytest.raises(
            OperationalError, match="20 earlier questions have no answer yet"
        ) as caught:
            ask_one("the hanging", hang, within=PATIENCE)
        # Then it has not even begun.
        assert not isinstance(caught.value, NoAnswer)
        # A node may have the name of a service.
        assert ask_nodes(["the hanging"], lambda node, alive: 2, patience=PATIENCE) == {
            "the hanging": 2
        }
    finally:
        released.set()
    for thread in begun:
        thread.join(PATIENCE)
    assert ask_one("the hanging", hang, within=PATIENCE) == 1
    assert len(begun) == MAX_ABANDONED + 1


def test_what_was_asked_raises() -> None:
    with pytest.raises(LookupError, match="no such"):
        ask_one("somebody", lambda: {}["no such"], within=PATIENCE)
