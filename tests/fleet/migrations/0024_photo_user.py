from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0023_photo_checked")]

    operations = [
        migrations.AlterField("photo", "user_id", models.BigIntegerField(db_index=True)),
    ]
