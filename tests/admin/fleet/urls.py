from __future__ import annotations

from django.contrib import admin
from django.urls import path

from sharded_orm.admin import ShardedModelAdmin
from tests.photos.models import Album, Photo

admin.site.register([Photo, Album], ShardedModelAdmin)

urlpatterns = [path("admin/", admin.site.urls)]
