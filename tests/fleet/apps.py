from django.apps import AppConfig


class FleetConfig(AppConfig):
    """Its models live in the group ``fleet``; not installed by the settings of the tests."""

    name = "tests.fleet"
    label = "fleet"
    default_auto_field = "django.db.models.BigAutoField"
