"""Two servers with one PostgreSQL: the ledger has each request that replicas have received, whatever
process is killed meanwhile. `scripts/drills/kill_serving_pair.py` does the same for minutes.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.system.postgres import PostgresMissing
from tests.system.replica_site import ReplicaSite, replica_site
from tests.system.serving_crashes import ServingPair, write_settings

pytestmark = pytest.mark.system


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReplicaSite]:
    try:
        with replica_site(tmp_path, write_settings("embedded")) as made:
            yield made
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


def test_the_ledger_equals_a_recount_after_kills(site: ReplicaSite) -> None:
    pair, dice = ServingPair(site, "embedded", pause_s=0.5), Random(1)
    pair.start()
    for what in ("gateway", "gateway", "server", "gateway", "replica", "gateway"):
        pair.kill(what, dice)
        pair.await_progress(1)  # of each caller, at both gateways
    assert pair.finish() == []
    received = len(pair.read_received())
    assert sum(pair.count_ledger().values()) >= received > 0
