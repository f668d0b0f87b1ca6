"""A ticket server that has lost ids hands out none, until it is repaired (F3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.integration.tickets.faults.project import Project
from tests.integration.tickets.faults.servers import MariaDBTickets
from tests.integration.tickets.faults.ticket_client import Refused, TicketClient

Pair = list[MariaDBTickets]
BEHIND = "has left it before"
_names = itertools.count(1)


def begin(pair: Pair, form: str = "update") -> str:
    sequence = f"copied_{next(_names)}"
    for server in pair:
        server.create(sequence, form)
    return sequence


def project(pair: Pair, **options: object) -> Project:
    # A server is tried again by each call, or nearly each.
    options = {"TIMEOUT": 2.0, "BACKOFF": 0.001, **options}
    return Project({server.alias: server.for_clients for server in pair}, options)


def each_once(*clients: TicketClient) -> bool:
    ids = [number for client in clients for number in client.ids]
    return len(ids) == len(set(ids))


def of_first(numbers: Iterable[int]) -> list[int]:
    return [number for number in numbers if number % 2]


def draw_past_a_copy(client: TicketClient, pair: Pair, sequence: str, folder: Path) -> None:
    """Back the first server up, then draw until its partner has recorded later ids."""
    first, second = pair
    client.take_from(0, sequence), client.take_from(1, sequence)
    copied = first.position(sequence)
    first.back_up(folder)
    while second.partner_mark(sequence) < copied + 2000:
        client.take(sequence, 1000)


def repair(pair: Pair, sequence: str) -> None:
    with TicketClient(project(pair)) as administrator:
        with pytest.raises(Refused, match="has left it: it would be handed out again"):
            administrator.manage("tickets", "verify", sequence)
        administrator.manage("tickets", "advance", sequence)
        administrator.manage("tickets", "verify", sequence)


@pytest.mark.parametrize("form", ["update", "replace"])
def test_an_old_copy_is_refused_until_it_is_advanced(pair: Pair, tmp_path: Path, form: str) -> None:
    first, second = pair
    sequence = begin(pair, form)
    with TicketClient(project(pair)) as running, TicketClient(project(pair)) as new:
        draw_past_a_copy(running, pair, sequence, tmp_path / "copy")
        first.put_back(tmp_path / "copy")
        stands = first.position(sequence)
        for client in (running, new):
            for count in (1, 1, 1, 1, 700, 7000, 70_000, 1, 1, 1, 1):
                assert of_first(client.take(sequence, count)) == []
            assert any(BEHIND in line for line in client.log)
            with second.cut(), pytest.raises(Refused) as caught:
                client.take(sequence)
            assert caught.value.kind == "TicketServersUnavailable"
            assert f"'tickets_1': 'tickets_1' stands at {stands} in" in caught.value.message
            assert BEHIND in caught.value.message
            assert "'tickets_2': (2002, " in caught.value.message
        repair(pair, sequence)
        for client in (running, new):
            client.take_from(0, sequence)
        assert each_once(running, new)


def test_to_be_asked_does_not_repair_it(pair: Pair, tmp_path: Path) -> None:
    first, _ = pair
    sequence = begin(pair)
    with TicketClient(project(pair)) as running, TicketClient(project(pair)) as new:
        draw_past_a_copy(running, pair, sequence, tmp_path / "copy")
        # No other process and no server knows of this id.
        running.take_from(0, sequence, 50_000)
        first.put_back(tmp_path / "copy")
        for client in (new, running):
            # A server that continued after the known ids would hand out the unknown ones again.
            for count in (1, 1, 10_000, 10_000, 10_000, 10_000, 1, 1):
                assert of_first(client.take(sequence, count)) == []
        assert each_once(running, new)


def test_a_new_process_may_refuse_what_it_cannot_check(pair: Pair, tmp_path: Path) -> None:
    first, second = pair
    sequence = begin(pair)
    with (
        TicketClient(project(pair)) as running,
        TicketClient(project(pair, PARTNER_DOWN="refuse")) as new,
    ):
        draw_past_a_copy(running, pair, sequence, tmp_path / "copy")
        first.put_back(tmp_path / "copy")
        with second.cut(), pytest.raises(Refused) as caught:
            new.take(sequence)
        assert caught.value.kind == "TicketServersUnavailable"
        assert "PARTNER_DOWN is 'refuse'" in caught.value.message
        assert "PARTNER_DOWN is 'refuse'" in caught.value.message
        assert of_first(new.take(sequence)) == []


@pytest.mark.parametrize("by_hand", [True, False])
def test_an_empty_data_folder_is_not_begun_again(pair: Pair, tmp_path: Path, by_hand: bool) -> None:
    first, second = pair
    first.execute("DROP DATABASE tickets")
    first.execute("CREATE DATABASE tickets")
    first.back_up(tmp_path / "empty")
    sequence = begin(pair)
    with TicketClient(project(pair)) as running, TicketClient(project(pair)) as new:
        running.take_from(0, sequence), running.take_from(1, sequence)
        first.put_back(tmp_path / "empty")
        for client in (running, new):
            for _ in range(4):
                assert of_first(client.take(sequence)) == []
            assert any("'tickets_1' has no sequence" in line for line in client.log)
            with second.cut(), pytest.raises(Refused) as caught:
                client.take(sequence)
            assert caught.value.kind == "TicketServersUnavailable"
            assert "'tickets_1': 'tickets_1' has no sequence" in caught.value.message
            assert "'tickets_2': (2002, " in caught.value.message
        if by_hand:
            first.create(sequence)  # from the very beginning
            for client in (running, new):
                for _ in range(4):
                    assert of_first(client.take(sequence)) == []
            repair(pair, sequence)
        else:
            with TicketClient(project(pair)) as administrator:
                administrator.manage("tickets", "create", sequence)
        for client in (running, new):
            client.take_from(0, sequence)
        assert each_once(running, new)
