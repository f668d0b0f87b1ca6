from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0018_labels")]

    operations = [
        migrations.RenameIndex(
            "photo", new_name="fleet_photo_by_time", old_name="fleet_photo_time"
        ),
    ]
