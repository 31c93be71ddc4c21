"""Reads recorded requests: when each request arrived, and how long a replica processes it.

A trace of a language model has token counts but no service times. `TokenSpeed` computes the service
times from the token counts, in the same way for all compared rules.
"""

import csv
import gzip
import io
import json
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from random import Random

from cavvy.capabilities.simulation.traces.readers import TraceError
from cavvy.domain.values import Struct

_Row = Mapping[str, str]
# the arrival, the service time, and the tokens of the prompt and of the answer; -1: not stated
_Request = tuple[float, float, float, float]
# a rate is recorded once in this many seconds; used only if a file has a single reading
_READING_S = 60.0
# maximum requests that are drawn at random for a file that states only counts or rates
_MOST_DRAWN = 20_000_000
_LONGEST_VALUE = 1 << 17  # characters; `csv` has one limit a process, which other readers change
_LONGEST_S = 366 * 86400.0  # a longer trace has times in other units, or a wrong time


class RequestTrace(Struct, frozen=True, kw_only=True):
    """Requests in the order of their arrival, in seconds since the first arrival. `tokens` contains
    the tokens of each prompt and of its answer; () if the trace does not state them.
    """

    name: str
    arrivals_s: tuple[float, ...]
    services_s: tuple[float, ...]
    tokens: tuple[tuple[float, float], ...] = ()

    @property
    def length_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def work_s(self) -> float:
        """The sum of all service times."""
        return sum(self.services_s)


class TokenSpeed(Struct, frozen=True, kw_only=True):
    """The times that a language model needs for each token of the prompt and of the response. The
    defaults have the magnitude of a 70B model on a node of H100s (Splitwise, ISCA 2024, figure 5),
    but are not a measurement of such a model. In addition, each prompt takes `base_ms`, and each
    token of an answer `running_ms` for each request that runs; both are only used where several
    requests on a replica slow each other down.
    """

    prompt_ms: float = 0.2
    answer_ms: float = 25.0
    base_ms: float = 0.0
    running_ms: float = 0.0

    def service_s(self, prompt: float, answer: float) -> float:
        return max(0.01, (prompt * self.prompt_ms + answer * self.answer_ms) / 1000.0)


class RequestOptions(Struct, frozen=True, kw_only=True):
    """The options for the conversion of a file to requests. `speed` is the token speed. `service_s`
    is the service time of a request if the file does not state it. If the file states only the rate
    of arrivals, the arrival times are drawn at random with `seed`.
    """

    speed: TokenSpeed = TokenSpeed()
    service_s: float = 23.0
    seed: int = 0


def read_requests(path: Path, options: RequestOptions | None = None) -> RequestTrace:
    """Read a file of one of the formats in `_READERS`. The file can be compressed (.gz, .tar.gz).
    Raises TraceError.
    """
    options = options or RequestOptions()
    try:
        text = _read_text(path)
        if not text.strip():
            raise TraceError(f"{path}: the file has no requests")
        found = sorted(map(_check, _read_rows(path, text, options)))
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, UnicodeDecodeError, EOFError, zlib.error):
        expected = "expected CSV or JSON lines in UTF-8, or such a file in .gz or .tar.gz"
        raise TraceError(f"{path}: the file cannot be read; {expected}") from None
    except (
        *(KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError),
        csv.Error,
    ) as error:
        is_short = isinstance(error, TypeError | AttributeError)
        told = "a value is missing, or not a number" if is_short else error
        raise TraceError(f"{path}: expected one request in each row: {told}") from None
    if not found:
        raise TraceError(f"{path}: the file has no requests")
    first = found[0][0]
    longest = max(found[-1][0] - first, *(length for _, length, *_ in found))
    if longest > _LONGEST_S:
        days = f"{longest / 86400:,.0f} days"
        raise TraceError(f"{path}: expected times in seconds, of at most a year, not {days}")
    name = path.name.partition(".")[0]
    return RequestTrace(
        name=name,
        arrivals_s=tuple(at - first for at, *_ in found),
        services_s=tuple(length for _, length, *_ in found),
        tokens=tuple((prompt, answer) for *_, prompt, answer in found)
        if all(prompt >= 0 for *_, prompt, _ in found)
        else (),
    )


def _check(request: _Request) -> _Request:
    at, length, *_ = request
    if not isfinite(at) or not 0 <= length < inf:
        raise ValueError(f"{at:g} s and {length:g} s are not an arrival and a time of service")
    return request


def _read_text(path: Path) -> str:
    """Return the text of a file without the mark that some programs write at its beginning."""
    if path.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(path) as archive:
            files = [archive.extractfile(member) for member in archive if member.isfile()]
            if len(files) != 1 or files[0] is None:
                raise TraceError(f"{path}: expected an archive with one file, not {len(files)}")
            return files[0].read().decode("utf-8-sig")
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode("utf-8-sig")
    return path.read_text("utf-8-sig")


def _read_rows(path: Path, text: str, options: RequestOptions) -> Iterable[_Request]:
    if text.lstrip().startswith("{"):
        rows: Iterator[_Row] = map(json.loads, filter(None, text.splitlines()))
        return _read_mooncake(rows, options)
    csv.field_size_limit(_LONGEST_VALUE)
    table = csv.DictReader(io.StringIO(text))
    columns = set(table.fieldnames or ())
    for needed, reader in _READERS:
        if needed <= columns:
            return reader(table, options)
    known = "; ".join(", ".join(sorted(needed)) for needed, _ in _READERS)
    raise TraceError(
        f"{path}: the columns {', '.join(sorted(columns))} belong to no known format; expected "
        f"the columns of one of these: {known}; or JSON lines with timestamp, input_length and "
        "output_length"
    )


def _read_plain(rows: Iterable[_Row], _: RequestOptions) -> Iterator[_Request]:
    for row in rows:
        yield float(row["arrival_s"]), float(row["service_s"]), -1, -1


def _read_tokens(rows: Iterable[_Row], options: RequestOptions) -> Iterator[_Request]:
    for row in rows:
        at, tokens = float(row["arrival_s"]), (row["prompt_tokens"], row["answer_tokens"])
        yield _of_tokens(at, float(tokens[0]), float(tokens[1]), options)


def _of_tokens(at: float, prompt: float, answer: float, options: RequestOptions) -> _Request:
    if not (0 <= prompt < inf and 0 <= answer < inf):
        raise ValueError(f"{prompt:g} and {answer:g} are not numbers of tokens")
    return at, options.speed.service_s(prompt, answer), prompt, answer


def _read_counts(rows: Iterable[_Row], options: RequestOptions) -> Iterator[_Request]:
    """Read a file with the numbers of requests in steps that begin at `start_s`. Arrivals are
    spread over each step at random, and times of service are exponentially distributed.
    """
    counts = sorted((float(row["start_s"]), int(row["requests"])) for row in rows)
    step = min((b - a for (a, _), (b, _) in pairwise(counts)), default=3600.0)
    if any(count < 0 for _, count in counts):
        raise ValueError("a number of requests is negative")
    _check_drawn(sum(count for _, count in counts))
    random = Random(options.seed)
    for start, count in counts:
        for _ in range(count):
            at = start + step * random.random()
            yield at, random.expovariate(1.0 / options.service_s), -1, -1


def _check_drawn(count: float) -> None:
    if not count <= _MOST_DRAWN:
        raise ValueError(f"the rows state {count:.3g} requests, more than {_MOST_DRAWN:,}")


def _read_azure(rows: Iterable[_Row], options: RequestOptions) -> Iterator[_Request]:
    """Read the Azure LLM inference traces of 2023 and 2024."""
    for row in rows:
        at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
        prompt, answer = float(row["ContextTokens"]), float(row["GeneratedTokens"])
        yield _of_tokens(at, prompt, answer, options)


def _read_burst_gpt(rows: Iterable[_Row], options: RequestOptions) -> Iterator[_Request]:
    for row in rows:
        prompt, answer = float(row["Request tokens"]), float(row["Response tokens"])
        yield _of_tokens(float(row["Timestamp"]), prompt, answer, options)


def _read_mooncake(rows: Iterable[_Row], options: RequestOptions) -> Iterator[_Request]:
    """Read Mooncake's traces. The traces give times in steps of several seconds, so the requests of
    a step are distributed randomly over the step.
    """
    found = [
        (float(row["timestamp"]) / 1000.0, float(row["input_length"]), float(row["output_length"]))
        for row in rows
    ]
    times = sorted({at for at, _, _ in found})
    step = min((b - a for a, b in pairwise(times)), default=0.0)
    random = Random(options.seed)
    for at, prompt, answer in found:
        spread = step * random.random() if step > 1 else 0.0
        yield _of_tokens(at + spread, prompt, answer, options)


def _read_executions(rows: Iterable[_Row], _: RequestOptions) -> Iterator[_Request]:
    """Read GenTD26's requests for images, except requests without a recorded execution time."""
    for row in rows:
        length = float(row["exec_time_seconds"] or 0)
        if length > 0:
            yield datetime.fromisoformat(row["gmt_create"]).timestamp(), length, -1, -1


def _read_rates(rows: Iterable[_Row], options: RequestOptions) -> Iterator[_Request]:
    """Read the requests per second of GenTD26. The values of all containers at the same time are
    added up. Arrivals are drawn from a Poisson process with this rate, and service times from an
    exponential distribution.
    """
    rates: defaultdict[float, float] = defaultdict(float)
    for row in rows:
        if row["request_type"].startswith("Generative"):
            rates[float(row["timestamp_anon"])] += float(row["value"])
    times = sorted(rates)
    gaps = [b - a for a, b in pairwise(times)]
    step = min(gaps, default=_READING_S)
    random = Random(options.seed)
    _check_drawn(step * sum(rate for rate in rates.values() if not rate <= 0))
    for at in times:
        arrival = at + random.expovariate(rates[at]) if rates[at] > 0 else inf
        while arrival < at + step:
            yield arrival, random.expovariate(1.0 / options.service_s), -1, -1
            arrival += random.expovariate(rates[at])


_READERS: tuple[
    tuple[frozenset[str], Callable[[Iterable[_Row], RequestOptions], Iterator[_Request]]], ...
] = (
    (frozenset({"arrival_s", "service_s"}), _read_plain),
    (frozenset({"arrival_s", "prompt_tokens", "answer_tokens"}), _read_tokens),
    (frozenset({"start_s", "requests"}), _read_counts),
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _read_azure),
    (frozenset({"Timestamp", "Request tokens", "Response tokens"}), _read_burst_gpt),
    (frozenset({"gmt_create", "exec_time_seconds"}), _read_executions),
    (frozenset({"timestamp_anon", "value", "request_type"}), _read_rates),
)
