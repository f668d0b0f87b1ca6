from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sharded_orm_lookups", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="lookupstate",
            name="unique",
            field=models.BooleanField(null=True),
        ),
    ]
