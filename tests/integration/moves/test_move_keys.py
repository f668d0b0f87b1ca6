"""Keys are moved by command: all their rows are on the new shard, and nowhere else."""

from __future__ import annotations

from tests.integration.moves.site import Site


def test_a_key_moves_with_all_its_rows(site: Site) -> None:
    before = site.rows()
    report = site.move("3", "--to", "0", "--json").json
    assert report["ok"], report
    assert report["moved"] == {"3": 0}
    assert site.rows() == before
    assert site.place() == 0
    counts = site.counts()
    assert counts[0] and not counts[3]


def test_a_key_comes_back(site: Site) -> None:
    before = site.rows()
    for target in ("1", "3", "1"):
        site.move("3", "--to", target)
        assert site.rows() == before
    assert site.place() == 1


def test_keys_that_are_there_are_skipped(site: Site) -> None:
    report = site.move("3", "7", "--to", "3", "--json").json
    assert (report["already"], report["moved"], report["run"] is None) == (["3", "7"], {}, False)
