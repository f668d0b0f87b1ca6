"""The Django app of reference tables: global tables, with a copy of all their rows on each shard."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig, apps
from django.core.exceptions import ImproperlyConfigured
from django.db.models.signals import post_migrate, pre_save


class ReferencesConfig(AppConfig):
    name = "sharded_orm.contrib.references"
    label = "sharded_orm_references"
    verbose_name = "Reference tables"
    default_auto_field = "django.db.models.BigAutoField"
    #: dumpdata leaves out the tables of this app. They record which changes the copies on this
    #: site's shards have. On the site that loads the fixture, these records would be wrong.
    is_left_out_of_fixtures = True

    def ready(self) -> None:
        if not apps.is_installed("sharded_orm.contrib.mirrors"):
            raise ImproperlyConfigured(
                f"{self.name!r} needs the relay and the commands of mirrors. Add"
                " 'sharded_orm.contrib.mirrors' to INSTALLED_APPS."
            )
        from sharded_orm.backends.write_hooks.followers import provide_followers
        from sharded_orm.contrib.mirrors.companions import provide_companion
        from sharded_orm.contrib.references.backend import require_hooks
        from sharded_orm.contrib.references.declaration import reference_models
        from sharded_orm.contrib.references.maintenance import ReferenceTables
        from sharded_orm.contrib.references.versions import begin_history, refuse_fixtures
        from sharded_orm.contrib.references.writes import follower_of

        if reference_models():
            # Raise an error if the backend of the global database does not report each write. The
            # methods of models and querysets cannot report them all, because some writes of the ORM
            # call no such method. The copies would miss these writes.
            require_hooks()
        # The import registers the system checks.
        import_module("sharded_orm.contrib.references.checks")
        provide_followers(follower_of, everywhere=True)
        provide_companion(ReferenceTables())
        pre_save.connect(refuse_fixtures)
        post_migrate.connect(begin_history, sender=self)
