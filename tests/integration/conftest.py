"""What tests of several parts listen to."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.backends.mysql import node as node_module
from sharded_orm.backends.mysql.session import NodeSession, connect


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that were sent since the fixture was made, one entry per packet.

    Only of sessions that are opened from then on: ask for it before ``node``.
    """
    sent: list[str] = []

    def counting(params: dict[str, Any]) -> NodeSession:
        session = connect(params)
        query = session.query

        def counted(statement: bytes) -> None:
            sent.append(statement.decode())
            query(statement)

        session.query = counted
        return session

    monkeypatch.setattr(node_module, "connect", counting)
    return sent
