"""The data traffic of nodes, which is a part of a job's costs."""

from datetime import date

from msgspec import Struct


class TrafficView(Struct, frozen=True, kw_only=True):
    """The data of one kind that a node has sent: its checkpoints, its log, or one output. `output`
    is the number of the output in the task. The price is in micro-dollars per GB (10^9 bytes), as
    of its date. If the price is unknown, it is null and the bill does not include the data.
    """

    attempt: int
    rank: int
    kind: str
    output: int | None
    bytes: int
    micros_per_gb: int | None
    price_as_of: date | None
