from __future__ import annotations

from django.apps import AppConfig


class ObjectsConfig(AppConfig):
    name = "sharded_orm.contrib.objects"
    label = "sharded_orm_objects"
    verbose_name = "Objects"
    default_auto_field = "django.db.models.BigAutoField"
