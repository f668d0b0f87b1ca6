"""A cache server that fails in each transaction is logged once in a while."""

from __future__ import annotations

import logging

import pytest

from sharded_orm.cache.failure_log import INTERVAL, FailureLog
from sharded_orm.cache.stores.local import LocalServer
from tests.clock import Clock


def test_a_warning_is_logged_once_per_server_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = FailureLog(clock)
    one, two = LocalServer("one"), LocalServer("two")
    with caplog.at_level(logging.WARNING, "sharded_orm.cache"):
        for number in range(5):
            log.warn(one, "%s is down: %d", one.name, number)
        log.warn(two, "%s is down: %d", two.name, 7)
        log.warn(one, "%s was not told", one.name)
        assert caplog.messages == [
            "memory one is down: 0",
            "memory two is down: 7",
            "memory one was not told",
        ]
        clock.now += INTERVAL
        log.warn(one, "%s is down: %d", one.name, 8)
    assert caplog.messages[3:] == ["memory one is down: 8 (4 more since the last line like this)"]
