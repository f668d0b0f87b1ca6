from django.apps import AppConfig


class PhotosConfig(AppConfig):
    name = "tests.photos"
    label = "photos_app"
    default_auto_field = "django.db.models.BigAutoField"
