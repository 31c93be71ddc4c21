"""The figures of services that the server exports."""

from collections import Counter

from cavvy.capabilities.serving.control.requests import ServiceStatus
from cavvy.telemetry import Figures

# the results of requests, each with its field of `ServiceTraffic`; a request has one of them
_RESULTS = {"answered": "answered", "lost": "lost", "refused": "unserved"}


def add_service(figures: Figures, status: ServiceStatus) -> None:
    """Add the figures of a service."""
    service, traffic = status.service, status.traffic
    labels = {"project": service.project, "service": service.name}
    states = Counter(each.state for each in service.replicas)
    for state, count in states.items():
        figures.add("cavvy_service_replicas", "Replicas by state.", count, **labels, state=state)
    if traffic is None:
        return
    for result, name in _RESULTS.items():
        figures.add(
            "cavvy_service_requests",
            "Requests that have ended, since the gateway started.",
            getattr(traffic, name),
            kind="counter",
            **labels,
            result=result,
        )
    for name, text, value in (
        ("cavvy_service_in_flight", "Requests that replicas work on.", traffic.in_flight),
        ("cavvy_service_waiting", "Requests that wait for a replica.", traffic.backlog),
    ):
        figures.add(name, text, value, **labels)
    figures.add(
        "cavvy_service_late",
        "Requests that waited longer for a replica than the service aims at.",
        traffic.late,
        kind="counter",
        **labels,
    )
    for quantile, seconds in (
        ("0.5", traffic.p50_s),
        ("0.95", traffic.p95_s),
        ("0.99", traffic.p99_s),
    ):
        figures.add(
            "cavvy_service_latency_seconds",
            "Latency of requests since the gateway started.",
            seconds,
            **labels,
            quantile=quantile,
        )
