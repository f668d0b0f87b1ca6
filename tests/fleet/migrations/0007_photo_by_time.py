from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0006_longer_titles")]

    operations = [
        migrations.AddIndex(
            "photo", models.Index(fields=["user_id", "taken"], name="fleet_photo_time")
        ),
    ]
