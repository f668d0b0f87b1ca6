"""Fixtures for tests of several parts."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.backends.mysql import node as node_module
from sharded_orm.backends.mysql.session import NodeSession, connect


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements sent since the fixture was set up, one entry per packet.

    It records only sessions that are opened after that, so request it before ``node``.
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
