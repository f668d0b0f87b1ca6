from django.apps import AppConfig


class FindersConfig(AppConfig):
    name = "tests.finders"
    default_auto_field = "django.db.models.BigAutoField"
