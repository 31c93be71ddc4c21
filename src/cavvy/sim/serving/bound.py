"""Computes a lower bound of the replica-hours that a service needs for a known load."""

from cavvy.sim.serving.requests import RequestTrace
from cavvy.sim.serving.service import ServiceSetting


def bound_replica_hours(trace: RequestTrace, setting: ServiceSetting) -> float:
    """Return a lower bound of the replica-hours of any schedule that serves all requests.

    Each request occupies one slot for its service time, and a replica has `concurrency` slots, so
    the billed replica time is at least the sum of the service times divided by the number of slots.
    The bound assumes that all slots are in use while a replica is billed, and that replicas start
    immediately; real optima are higher.
    """
    return trace.work_s / setting.concurrency / 3600.0
