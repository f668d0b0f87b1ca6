from django.apps import AppConfig


class CachedConfig(AppConfig):
    name = "tests.cached"
    label = "cached"
    default_auto_field = "django.db.models.BigAutoField"
