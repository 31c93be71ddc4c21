"""The time that replicas need for a batch of requests."""

from cavvy.domain.values import Struct


class BatchFit(Struct, frozen=True, kw_only=True):
    """A batch of n requests takes `slope_s` * n + `base_s` seconds. `most` is the average number of
    requests in a full batch. A batch of more than `most` requests would be too large or would end
    too late.
    """

    slope_s: float
    base_s: float
    most: float

    def expect_s(self, requests: float) -> float:
        """Return the expected processing time of a batch of `requests` requests, in seconds."""
        return self.slope_s * requests + self.base_s
