from django.apps import AppConfig


class PinboardsConfig(AppConfig):
    name = "tests.pinboards"
    default_auto_field = "django.db.models.BigAutoField"
