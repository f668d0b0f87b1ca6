from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0017_photo_height")]

    operations = [
        migrations.AlterModelTable("tag", "fleet_labels"),
    ]
