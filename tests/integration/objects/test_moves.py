"""Shards of objects, mappings and lookups move while processes write and read. Keys never move."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.integration.imports.site import site_fixture, site_on
from tests.integration.objects.gallery_site import PREAMBLE, GallerySite
from tests.integration.shard_moves.site import Site as MovingSite
from tests.patience import PATIENCE


class MovingGallery(MovingSite, GallerySite):
    """A gallery whose topology is in the global database, so that its shards can move."""

    def initialize(self) -> None:
        self.prepare()


moving_gallery = site_fixture(MovingGallery, everywhere=True)


#: Writes objects and entries, edits an object that all share, and looks each time for what it has written.
_TELLER = """
import os
from sharded_orm.exceptions import CacheUnavailable, ShardMoved
me, stop, shared, album = {me}, {stop!r}, {shared}, {album}
own, named, edits, refused, reads, wrong, n = [], {{}}, 0, 0, 0, [], 0

def look():
    ids, after = [], None
    while True:
        page = AlbumPictures.objects.page(album, after=after, size=7)
        ids += [picture.pk for picture in page]
        after = page.next
        if after is None:
            break
    batch = Picture.objects.get_many(own)
    count = Picture.objects.get(shared).count
    if not set(own) <= set(ids) or len(ids) != len(set(ids)) or list(batch) != own or count < edits:
        wrong.append([sorted(set(own) - set(ids)), len(ids) - len(set(ids)), len(own) - len(batch), count, edits])
    for value, pk in named.items():
        if PicturesByName.objects.find(value).pk != pk:
            wrong.append(value)

while not os.path.exists(stop):
    n += 1
    try:
        if n % 3 == 0:
            picture = Picture.objects.create(near=None if n % 2 else album_row(), count=n)
            AlbumPictures.objects.add(album, picture)
            own.append(picture.pk)
        elif n % 3 == 1:
            with Picture.objects.get(shared).edit() as picture:
                picture.count += 1
            edits += 1
        else:
            value = f"{{me}} {{n % 4}}"
            named[value] = PicturesByName.objects.find_or_create(value)[0].pk
    except (ShardMoved, CacheUnavailable):
        refused += 1  # Nothing of the last statement or block is stored.
    look()
    reads += 1
print(json.dumps([own, named, edits, reads, wrong]))
"""


@pytest.mark.long
def test_a_bank_of_objects_while_their_shards_move(
    moving_gallery: MovingGallery, tmp_path: Path, memcached: Any
) -> None:
    site = moving_gallery
    site.content["caches"] = {"default": memcached.django()}
    site.content["sharded_orm"]["CACHE"] |= {
        "TIMEOUT": 0.9, "COMMIT_WITHIN": 1, "QUARANTINE": 2.1, "PREFIX": secrets.token_hex(4),
    }  # fmt: skip
    site.save()
    album, shared = site.run("""
album = Album.objects.using("pins_00000").create(name="a")
print(json.dumps([album.pk, Picture.objects.using("pins_00000").create().pk]))
""")
    stop = str(tmp_path / "stop")
    album_row = "album_row = lambda: Album.objects.get(album)\n"
    tellers = [
        site.start(
            "run",
            PREAMBLE + album_row + _TELLER.format(me=me, stop=stop, shared=shared, album=album),
        )
        for me in range(3)
    ]
    try:
        for group, shard, node in (
            ("pins", "0", "db2"),
            ("accounts", "1", "db2"),
            ("pins", "3", "db1"),
            ("pins", "0", "db1"),
        ):
            assert site.move(group, shard, "--to", node, "--json").json["moved"] == {shard: node}
    finally:
        (tmp_path / "stop").touch()
        results = []
        for teller in tellers:
            out, err = teller.communicate(timeout=PATIENCE)
            assert teller.returncode == 0, err
            results.append(json.loads(out))
    assert [wrong for *_, wrong in results] == [[]] * 3
    assert all(reads > 5 and edits for _, _, edits, reads, _ in results)
    ids, count, version, found = site.run(f"""
ids = list(AlbumPictures.objects.uncached().filter(source_id={album}).values_list("target_id", flat=True))
shared = Picture.objects.with_deleted().uncached().get(pk={shared})
values = {[value for _, named, *_ in results for value in named]!r}
print(json.dumps([ids, shared.count, shared.version, {{v: p.pk for v, p in PicturesByName.objects.find_many(values).items()}}]))
""")
    assert sorted(ids) == sorted(pk for own, *_ in results for pk in own)
    assert count == version - 1 == sum(edits for _, _, edits, *_ in results)
    assert found == {value: pk for _, named, *_ in results for value, pk in named.items()}


def test_keys_of_objects_do_not_move(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with site_on("sqlite", request, tmp_path, GallerySite) as site:
        pk = site.run('print(Album.objects.using("pins_00001").create(name="a").pk)')
        for group, key in (("pins", str(pk)), ("accounts", "a")):
            done = site.manage("keys", "move", group, key, "--to", "2", code=1)
            assert "cannot move by itself" in done.err
        assert site.run(f"print(json.dumps(Album.objects.get({pk}).name))") == "a"
