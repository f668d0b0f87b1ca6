from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0007_photo_by_time")]

    operations = [
        migrations.AddConstraint(
            "photo",
            models.CheckConstraint(condition=models.Q(width__gte=0), name="fleet_photo_width"),
        ),
    ]
