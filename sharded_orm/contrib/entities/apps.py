"""The Django app of entities, which are sets of properties with an id."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate


class EntitiesConfig(AppConfig):
    name = "sharded_orm.contrib.entities"
    label = "sharded_orm_entities"
    verbose_name = "Entities"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from sharded_orm.contrib.entities.index_states import after_migrate, before_migrate

        pre_migrate.connect(before_migrate, sender=self)
        post_migrate.connect(after_migrate, sender=self)
