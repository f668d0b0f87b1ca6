"""A strategy of somebody's own, with a mistake."""

from __future__ import annotations

from typing import Any

from sharded_orm.routing.base import Strategy


class Broken(Strategy):
    """Cannot be made."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("a mistake")

    def locate(self, key: Any) -> int:
        return 0
