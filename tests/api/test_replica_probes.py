"""The probes of replicas whose port is not known."""

import asyncio
from datetime import timedelta

from tests.waits import patience

from cavvy.api.serving.probes import ProbedPort, ReplicaProbes
from cavvy.control.serving.front import ProbeRecord
from cavvy.domain.services import ReadinessProbe

OFTEN = ReadinessProbe(every=timedelta(milliseconds=1))


def test_a_ready_replica_that_stays_out_of_reach_fails_its_probe() -> None:
    async def story() -> None:
        probes = ReplicaProbes()
        ports = {
            "starts": ProbedPort(lambda: 0, OFTEN, patience_s=0.0),
            "was-ready": ProbedPort(lambda: 0, OFTEN, ready=True, patience_s=0.0),
            "comes-back": ProbedPort(lambda: 0, OFTEN, ready=True),
        }
        probes.watch("s", ports, lambda: None)
        async with patience():
            while probes.record("was-ready").failures < 3:
                await asyncio.sleep(0.001)
        assert probes.record("starts") == probes.record("comes-back") == ProbeRecord()
        probes.close()

    asyncio.run(story())
