"""What gateways report about the requests of a service: latencies, the time of batches, the speed
of language models, and the requests that must stay in certain places.
"""

from collections.abc import Mapping

from cavvy.domain.values import Struct

_SUB_BITS = 2  # each power of two has four buckets; a quantile is at most 25 % above the truth


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


class TokenTimes(Struct, frozen=True, kw_only=True):
    """Sums over the streamed answers of language models; they only grow while the gateway runs.

    `answers` answers have been measured, with a total of `completion` tokens. For each of them, x
    is the number of tokens of its prompt that the replica had to compute, and y the time from the
    request, or from the last first token of the replica if this is later, to the first token:
    `prompt` is the sum of all x, `first_s` of all y, `prompt2` of all x * x, `cross_s` of all x * y
    and `first2` of all y * y. `gaps` is the number of tokens after the first ones. For each, x is
    the mean number of requests that the replica served during the answer, and y the mean time
    between its tokens without the time in which the replica computed other prompts: `running` is
    the sum of all x, `gap_s` of all y, `running2`, `running_gap_s` and `gap2` as above. `inverse`
    is the sum of 1 / gaps over the `longer` answers that had any. `late` answers missed an
    objective of the service.
    """

    answers: float = 0.0
    completion: float = 0.0
    prompt: float = 0.0
    first_s: float = 0.0
    prompt2: float = 0.0
    cross_s: float = 0.0
    first2: float = 0.0
    gaps: float = 0.0
    running: float = 0.0
    gap_s: float = 0.0
    running2: float = 0.0
    running_gap_s: float = 0.0
    gap2: float = 0.0
    longer: float = 0.0
    inverse: float = 0.0
    late: float = 0.0


class PromptSums(Struct, frozen=True, kw_only=True):
    """Sums over the requests of a service, whose prompts have x tokens; they only grow while the
    gateway runs. `arrived` is the sum of all x of requests that have arrived. `ended` requests were
    answered after a time of service of y seconds: `size` is the sum of their x, `time_s` of all y,
    `size2` of all x * x, and `cross_s` of all x * y.
    """

    arrived: float = 0.0
    ended: float = 0.0
    size: float = 0.0
    time_s: float = 0.0
    size2: float = 0.0
    cross_s: float = 0.0


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


def bucket_of(latency_us: int) -> int:
    """Return the bucket of a latency; there are four buckets for each power of two."""
    if latency_us < 4:
        return max(latency_us, 0)
    shift = latency_us.bit_length() - 1 - _SUB_BITS
    return ((shift + 1) << _SUB_BITS) + ((latency_us >> shift) & 3)


def upper_bound_of(bucket: int) -> int:
    """Return the smallest latency, in microseconds, that is too large for the bucket."""
    if bucket < 4:
        return bucket + 1
    shift = (bucket >> _SUB_BITS) - 1
    return ((bucket & 3) + 5) << shift


def find_quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the latency in seconds that this share of the requests did not exceed, or None without
    requests."""
    total = sum(buckets.values())
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= share * total:
            return upper_bound_of(bucket) / 1e6
    return None
