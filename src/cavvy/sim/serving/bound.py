"""What a service could cost at least if its future were known."""

from cavvy.sim.serving.requests import RequestTrace
from cavvy.sim.serving.service import ServiceSetting


def bound_replica_hours(trace: RequestTrace, setting: ServiceSetting) -> float:
    """A lower bound of the replica-hours of any schedule that serves all requests.

    Each request fills one slot for its time of service, and a replica has `concurrency` slots, so
    replicas are paid for at least the sum of the times of service divided by the slots. The bound
    assumes that all slots are full while a replica is paid, and that replicas start at once; real
    optima lie above it.
    """
    return trace.work_s / setting.concurrency / 3600.0
