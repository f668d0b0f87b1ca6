"""Strategies of a project's own, with bugs."""

from __future__ import annotations

from typing import Any

from sharded_orm.routing.base import Strategy


class Broken(Strategy):
    """Its constructor raises an error."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("a mistake")

    def locate(self, key: Any) -> int:
        return 0


class Endless(Broken):
    """Its constructor raises an error that no code expects."""

    def __init__(self, *args: Any) -> None:
        self.__init__(*args)  # type: ignore[misc]  # that is the bug
