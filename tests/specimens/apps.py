from django.apps import AppConfig


class SpecimensConfig(AppConfig):
    name = "tests.specimens"
    label = "specimens"
    default_auto_field = "django.db.models.BigAutoField"
