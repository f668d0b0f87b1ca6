from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0015_wider_stars")]

    operations = [
        migrations.RemoveConstraint("photo", "fleet_photo_width"),
        migrations.RemoveField("photo", "width"),
        migrations.RemoveField("photo", "stars"),
    ]
