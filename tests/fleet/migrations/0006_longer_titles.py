from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0005_photo_taken")]

    operations = [
        migrations.AlterField("photo", "title", models.CharField(max_length=200)),
    ]
