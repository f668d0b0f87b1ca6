from django.apps import AppConfig


class SamplesConfig(AppConfig):
    name = "tests.samples"
    label = "samples"
    default_auto_field = "django.db.models.BigAutoField"
