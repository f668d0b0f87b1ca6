"""The admin pages of the photo site: their paths, and selectors of their parts."""

from __future__ import annotations

import re

from tests.acceptance.browser.chrome import Browser

MAP = "/admin/sharded_orm/shardmap/"
ALBUMS, PHOTOS = "/admin/photos/album/", "/admin/photos/photo/"
TAGS = "/admin/photos/phototag/"
ROW = "#result_list tbody tr"
LINK = f"{ROW} th a"
TITLE = f"{ROW} .field-title"
EDITED = f"{TITLE} [type=text]"
SHARD = f"{ROW} .field-sharded_orm_shard"
HERE = ".sharded-here"
MESSAGE = ".messagelist li"


def key_of_first(browser: Browser) -> str:
    """The shard key of the first row of a list, from its link."""
    address = browser.one(LINK).get_attribute("href")
    match = re.search(r"/(\d+)~\d+/change/", str(address))
    assert match, address
    return match[1]
