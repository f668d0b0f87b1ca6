"""A thread that has used all of 4096 shards keeps a bounded number of connections."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.many_shards import LIMIT, SHARDS
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def test_touching_all_of_4096_shards_is_bounded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.many_shards", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kept"] <= LIMIT
    assert found["iterated"] == 2
    # Since Django 6.1, system checks visit every alias that iteration yields.
    assert set(found["checked"]) <= {"default", "fleet"}
    # A few KiB for each connection object that is kept, and for each shard the record that all
    # threads share. A second walk over all shards adds nothing.
    assert found["once"] < LIMIT * 16 * 1024 + SHARDS * 1024
    assert found["grown"] < 64 * 1024
    assert found["in_transaction_kept"]
