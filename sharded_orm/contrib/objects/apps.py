from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class ObjectsConfig(AppConfig):
    name = "sharded_orm.contrib.objects"
    label = "sharded_orm_objects"
    verbose_name = "Objects"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # The import registers the system checks.
        import_module("sharded_orm.contrib.objects.checks")
