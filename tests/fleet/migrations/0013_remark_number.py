from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0012_album_name")]

    operations = [
        migrations.AddField("remark", "number", models.IntegerField(default=0)),
        migrations.AlterUniqueTogether("remark", {("photo", "number")}),
    ]
