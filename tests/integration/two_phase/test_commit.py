"""What a block with ``two_phase=True`` does while nothing dies."""

from __future__ import annotations

import pytest

import sharded_orm
from tests.integration.two_phase.bank import START, Bank
from tests.unit.backends.group.conftest import GROUP


def test_all_shards_commit(bank: Bank) -> None:
    bank.transfer(0, 8, 9)
    assert bank.balances() == [START + 2, START, START - 1, START - 1]
    assert bank.prepared() == []
    assert len(bank.decisions(0)) == 1
    assert bank.decisions(8) == bank.decisions(9) == []


def test_an_error_rolls_all_back(bank: Bank) -> None:
    with pytest.raises(ZeroDivisionError), sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, -1)
        1 / 0  # noqa: B018
    assert bank.balances() == [START] * 4
    assert bank.prepared() == [] and bank.decisions(0) == []
    bank.transfer(8, 0)
    assert bank.balances() == [START - 1, START, START + 1, START]
