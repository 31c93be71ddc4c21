"""What gateways report about the requests of a service: the time of batches, and the requests that
must stay in certain places.
"""

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


class PlaceLoad(Struct, frozen=True, kw_only=True):
    """The requests that must stay in one set of places, such as the EU. `waiting` is the number of
    requests that wait for a replica, and `asked_at` is when the last request arrived, in seconds
    since 1970.
    """

    waiting: int = 0
    asked_at: float = 0.0


# The requests by their places, as `write_places` writes these. "" stands for requests without a
# place; it is present only if other requests have one.
PlaceLoads = dict[str, PlaceLoad]


def write_places(places: frozenset[str]) -> str:
    """Return the places as one text, such as "de,eu". The inverse of `read_places`."""
    return ",".join(sorted(places))


def read_places(text: str) -> frozenset[str]:
    return frozenset(each for each in text.split(",") if each)
