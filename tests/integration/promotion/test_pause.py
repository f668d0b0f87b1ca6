"""How long writes were refused, if the promotion took more than one process."""

from __future__ import annotations

import time

from tests.integration.promotion.site import Site


def test_the_pause_of_a_resumed_promotion_has_the_time_between(site: Site) -> None:
    with site.writers(1) as writers:
        began = time.time()
        site.promote_and_die("begin:stopping")
        killed = time.time()
        writers.wait_for_refusals(0)
        resumed = time.time()
        report = site.promote("--json").json
        ended = time.time()
        writers.wait_for_more(0)
    assert resumed - killed < report["refused_for"] < ended - began
    assert report["refused_for_at_least"] == report["refused_for"]


def test_the_pause_ends_when_the_map_is_published(site: Site) -> None:
    began = time.time()
    site.promote_and_die("begin:switched")
    killed = time.time()
    report = site.promote("--json").json
    assert 0 < report["refused_for"] < killed - began
    assert report["refused_for_at_least"] == report["refused_for"]


def test_the_end_of_the_pause_is_not_known_to_the_millisecond(site: Site) -> None:
    """The process was killed before it could record in the journal that writes are possible."""
    began = time.time()
    site.promote_and_die(f"end:{site.last_before_switched}")
    killed = time.time()
    # A second process is killed, too: the upper bound of the pause does not grow any more.
    site.promote_and_die("begin:switched")
    found = time.time()
    report = site.promote("--json").json
    assert 0 < report["refused_for_at_least"] < killed - began
    assert report["refused_for_at_least"] < report["refused_for"] < found - began


def test_a_pause_that_began_before_the_promotion(site: Site) -> None:
    site.fence_first()
    done = site.promote("--json")
    assert done.json["refused_for"] is None
    assert done.json["refused_for_at_least"] > 0


def test_a_primary_that_took_writes_in_between(site: Site) -> None:
    site.promote_and_die("begin:stopping")
    killed = time.time()
    site.open_first()
    site.write_a_row(1)
    report = site.promote("--json").json
    ended = time.time()
    assert report["refused_for"] < ended - killed
    assert any("took writes again" in each for each in report["warnings"])
    assert site.rows("second") == {1}
