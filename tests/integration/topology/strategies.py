"""Strategies of somebody's own, with mistakes."""

from __future__ import annotations

from typing import Any

from sharded_orm.routing.base import Strategy


class Broken(Strategy):
    """Cannot be made."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("a mistake")

    def locate(self, key: Any) -> int:
        return 0


class Endless(Broken):
    """Its mistake is none that anybody expects."""

    def __init__(self, *args: Any) -> None:
        self.__init__(*args)  # type: ignore[misc]  # that is the mistake
