"""The rows of `cavvy cost meters`: the kinds of cost that the ledger meters, and the costs that
cannot be observed, each with the reason.
"""

from cavvy.domain.ledger import EntryKind
from cavvy.domain.values import Struct

ALL_PROVIDERS = "all"


class LedgerMeter(Struct, frozen=True, kw_only=True):
    """Describes how Cavvy determines the amounts of one kind of cost, which providers report these
    amounts, and which parts of the cost are missing and why.
    """

    kind: EntryKind
    source: str
    providers: tuple[str, ...] = (ALL_PROVIDERS,)
    missing: str = ""


METERS = (
    LedgerMeter(
        kind=EntryKind.NODE,
        source="each node's lifetime as its provider reports it, at the price of the node's offer",
    ),
    LedgerMeter(
        kind=EntryKind.DISK,
        source="disks and named volumes of a node while the node exists",
        providers=("aws", "azure"),
        missing="other providers do not bill disks separately, or do not report disk prices",
    ),
    LedgerMeter(
        kind=EntryKind.ADDRESS,
        source="public addresses of a node while the node exists",
        providers=("aws", "azure"),
        missing="addresses that are reserved without a node: Cavvy reserves none, so such an "
        "address does not belong to Cavvy",
    ),
    LedgerMeter(
        kind=EntryKind.STORAGE,
        source="volumes that Cavvy created. The charged time begins when the volume is created "
        "and ends when the provider last listed the volume; the time in which a job paid for "
        "the volume is left out",
        providers=("aws",),
        missing="volume claims of Kubernetes: a cluster reports no prices; buckets: no call "
        "returns their size, and listing them costs money; volumes that Cavvy did not create",
    ),
    LedgerMeter(
        kind=EntryKind.TRAFFIC,
        source="checkpoints, outputs and logs that agents send out of their cloud, at the "
        "catalog's price",
        missing="data that the job's program sends, which the agent cannot observe; data that a "
        "lost node could not report; prices that depend on the month's total",
    ),
    LedgerMeter(
        kind=EntryKind.IDLE,
        source="warm nodes and idle named machines, the unused part of minimum charges, machines "
        "of failed launches, and replicas of services between requests",
    ),
    LedgerMeter(
        kind=EntryKind.COLD_START,
        source="replicas of services until they are ready",
    ),
    LedgerMeter(
        kind=EntryKind.REQUEST,
        source="the time for which replicas of services processed the requests of each key, at "
        "the replica's price",
        missing="requests that HAProxy handles itself: HAProxy does not report the times of single "
        "requests",
    ),
    LedgerMeter(
        kind=EntryKind.CORRECTION,
        source="the change in cost when a provider corrects a time, a price or an amount of use "
        "that it had reported",
    ),
    LedgerMeter(kind=EntryKind.DISCOUNT, source="the discounts in the server's settings"),
)
