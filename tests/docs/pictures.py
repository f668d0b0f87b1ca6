"""The pictures of the documentation, taken by the browser tests.

``python -m tests.docs.pictures`` runs those tests on MariaDB and rewrites
``docs/howto/images``. It cuts off the blank part below, and reduces a page to 256 colours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from tests.docs.markdown import DOCS, ROOT

IMAGES = DOCS / "howto" / "images"
TESTS = "tests/acceptance/browser"
BACKEND = "mariadb"
MARGIN = 16  # pixels that are kept below the last content

#: Name of each picture → the test that takes it, its name there, and its largest height.
PICTURES = {
    "all-shards": ("all_shards", "everywhere", 820),
    "add": ("add_change_delete", "form", 560),
    "delete": ("delete_on_two_shards", "delete", 640),
    "map": ("map", "rows", 900),
    "shard": ("a_shard", "shard", 900),
    "down": ("node_killed_while_browsing", "map", 900),
}


def shrink(source: Path, target: Path, most: int) -> None:
    """Cut off the blank part below, or all beyond ``most`` pixels, and compress the picture."""
    with Image.open(source) as opened:
        page = opened.convert("RGB")
    blank = Image.new("RGB", page.size, page.getpixel((page.width - 1, page.height - 1)))
    used = ImageChops.difference(page, blank).getbbox()
    bottom = min(page.height, most, used[3] + MARGIN if used else most)
    page = page.crop((0, 0, page.width, bottom))
    # Without dithering: dots between two colours would not compress, and text is no photograph.
    few = page.quantize(256, dither=Image.Dither.NONE)
    few.save(target, optimize=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "--long", TESTS, "-k", BACKEND]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "SHARDED_ORM_TEST_ARTIFACTS": folder, "CI": "1"}
        )
        if done.returncode:
            return done.returncode
        IMAGES.mkdir(exist_ok=True)
        for name, (test, picture, most) in PICTURES.items():
            (source,) = (Path(folder) / "browser" / BACKEND / test).glob(f"*-{picture}.png")
            shrink(source, IMAGES / f"{name}.png", most)
            print(f"{IMAGES.relative_to(ROOT)}/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
