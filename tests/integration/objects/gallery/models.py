"""Objects of a site with mirrors, whose processes write at the same time."""

from __future__ import annotations

from sharded_orm.contrib.objects import Mapping, MirrorMapping, ObjectLookup, ShardedObject, fields


class Album(ShardedObject):
    name = fields.Text(default="")

    class ObjectMeta:
        group = "pins"
        type_id = 1


class Picture(ShardedObject):
    count = fields.Integer(default=0)
    seen_by = fields.JSON(default=dict)

    class ObjectMeta:
        group = "pins"
        type_id = 2
        cache = True
        max_body = 1 << 27  # twice the packet size of the test servers


class AlbumPictures(Mapping):
    source, target = Album, Picture

    class MappingMeta:
        cache = True


class PictureAlbums(MirrorMapping):
    mapping = AlbumPictures


class PicturesByName(ObjectLookup):
    target = Picture

    class LookupMeta:
        group = "accounts"
