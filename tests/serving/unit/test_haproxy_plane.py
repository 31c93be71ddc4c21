"""What is known of requests that HAProxy passes directly to replicas."""

import pytest

from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.gateway.haproxy.runtime import HaproxyLoad
from cavvy.capabilities.serving.server.haproxy_plane import DirectCount, add_direct, add_load


def test_requests_that_haproxy_still_holds_get_older() -> None:
    counted = DirectCount()
    for at_s, arrivals, in_flight, expected_s in (
        (100.0, 12, 12, 0.0),
        (101.0, 12, 12, 12.0),
        (103.0, 15, 15, 36.0),  # three are new
        (104.0, 15, 10, 10 * (36 / 15 + 1)),  # five have ended
        (105.0, 65, 10, 0.0),  # fifty were answered: nobody knows whether the ten are old
        (106.0, 65, 10, 10.0),
    ):
        counted = add_load(counted, HaproxyLoad(arrivals=arrivals, in_flight=in_flight), at_s)
        assert counted.in_flight_s == pytest.approx(expected_s)
    own = ServiceTraffic(at_s=106.0, in_flight=1, in_flight_s=5.0)
    traffic = add_direct(own, counted, whole=True)
    assert (traffic.in_flight, traffic.in_flight_s) == (11, 15.0)
    restarted = add_load(counted, HaproxyLoad(arrivals=2, in_flight=2), 107.0)
    assert restarted.in_flight_s == 0.0
