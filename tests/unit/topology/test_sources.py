"""Names and settings of sources; their behaviour is tested in ``tests/integration/topology``."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.sources.base import make_source

ZOOKEEPER = {"HOSTS": ["zk1:2181", "zk2:2181"], "LAST_GOOD": "/x/topology.json"}


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("nonesuch", {}, "SOURCE 'nonesuch' cannot be imported"),
        ("nonesuch", {}, "use one of ['database', 'file', 'static', 'zookeeper'] or a dotted path"),
        ("collections.OrderedDict", {}, "is not a TopologySource class"),
        ("static", {"PATH": "x"}, "unknown option 'PATH'; this source takes"),
        ("file", {}, "this source needs the option 'PATH'"),
        ("file", {"PATH": "x", "INTERVAL": 0}, "INTERVAL must be a positive number of seconds"),
        ("file", {"PATH": "x", "INTERVAL": math.nan}, "positive number of seconds, not nan"),
        ("file", {"PATH": "x", "INTERVAL": math.inf}, "positive number of seconds, not inf"),
        ("zookeeper", {**ZOOKEEPER, "TIMEOUT": math.nan}, "TIMEOUT must be a positive number"),
        ("file", {"PATH": "x", "CREDENTIALS": "no"}, "CREDENTIALS must be True or False"),
        ("database", {"ALIAS": "photos"}, "'tickets_2'], not 'photos'"),
        ("database", {"ALIAS": []}, "'tickets_2'], not []"),
        ("database", {"TIMEOUT": 2}, "TIMEOUT must be at least 3 times INTERVAL, not 2.0 with 1.0"),
        ("database", {"HISTORY": 0.5}, "HISTORY must be a whole number from 20 on, not 0.5"),
        ("database", {"HISTORY": 19}, "HISTORY must be a whole number from 20 on, not 19"),
        ("zookeeper", {"HOSTS": "zk1"}, "this source needs the option 'LAST_GOOD'"),
        ("zookeeper", {**ZOOKEEPER, "PATH": "x"}, "PATH must begin with '/', not 'x'"),
        ("zookeeper", {**ZOOKEEPER, "WAIT": -1}, "WAIT must be a positive number, not -1"),
        ("zookeeper", {**ZOOKEEPER, "ACL": [("world", "s3cret", "z")]}, "each of ACL must be"),
        ("zookeeper", {**ZOOKEEPER, "AUTH": ["s3cret"]}, "AUTH is a list of (scheme, credential)"),
        ("zookeeper", {**ZOOKEEPER, "CLIENT": {"tls": "s3cret"}}, "CLIENT a dict of its arguments"),
        ("zookeeper", {**ZOOKEEPER, "CLIENT": "s3cret"}, "CLIENT a dict of its arguments"),
    ],
)
def test_what_is_wrong_is_named(source: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_source(source, options, {})
    assert problem in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_it_tells_where_it_is() -> None:
    made = make_source("zookeeper", {**ZOOKEEPER, "AUTH": [("digest", "op:s3cret")]}, {})
    assert made.describe() == "ZooKeeper at zk1:2181,zk2:2181, /sharded_orm"
    assert made.last_good == "/x/topology.json"
    assert not made.allows_credentials
    made.stop()
