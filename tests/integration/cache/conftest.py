"""Fixtures with rows on known shards."""

from __future__ import annotations

from tests.queries.conftest import db_all, placed

__all__ = ["db_all", "placed"]
