"""The gateway's pure parts: heads, bodies, balance, rates and estimates."""

import base64
import itertools
import math
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.gateway_fuzz import make_requests

from cavvy.capabilities.serving.gateway import heads
from cavvy.capabilities.serving.gateway.admission import Preferences, read_prefer
from cavvy.capabilities.serving.gateway.balancing import (
    FARTHER,
    FULL,
    choose_by_key,
    choose_least,
    hash_key,
    make_ring,
)
from cavvy.capabilities.serving.gateway.bodies import ChunkedBody, as_chunk, make_body
from cavvy.capabilities.serving.gateway.config import GatewayLimits, RateLimit
from cavvy.capabilities.serving.gateway.heads import (
    NO_LENGTH,
    UNTIL_CLOSE,
    HeadError,
    HeadMemo,
    RequestHead,
    parse_request,
)
from cavvy.capabilities.serving.gateway.own_values import OwnValues, describe_owner
from cavvy.capabilities.serving.gateway.rates import ServiceRates, TokenBucket
from cavvy.capabilities.serving.gateway.statistics import estimate_retry_s
from cavvy.capabilities.serving.loads import bucket_of, find_quantile, upper_bound_of


class SecondOpinion:
    """What httptools finds in a head."""

    def __init__(self, head: bytes) -> None:
        self.fields: list[tuple[bytes, bytes]] = []
        self.target = b""
        parser: Any = httptools.HttpRequestParser(self)
        parser.feed_data(head)
        self.method = parser.get_method()

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.strip()))


_SECRETS = (b"cavvysvc_a-key", b"cavvy_" + b"aB3-_" * 8 + b"xyz", b"-9Zx" + b"kT3wQ" * 7 + b"w_8k")
_BETWEEN = (
    b"a",
    b"=",
    b"&",
    b";",
    b",",
    b" ",
    b"/",
    b"?",
    b"%20",
    b"%",
    b"cavvy",
    b'"',
    b"Bearer ",
)
_OWN = OwnValues(describe_owner(_SECRETS[2].decode()))


@st.composite
def _make_texts(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A text with a secret in some form, and the secret."""
    secret = draw(st.sampled_from(_SECRETS))
    form = draw(st.integers(0, 3))
    written = secret
    if form == 1:
        written = b"".join(b"%%%02X" % each for each in secret)
    elif form >= 2:
        encode = base64.b64encode if form == 2 else base64.urlsafe_b64encode
        written = encode(b"u" * draw(st.integers(0, 7)) + b":" + secret)
    around = st.lists(st.sampled_from(_BETWEEN), max_size=6).map(b"".join)
    gap = draw(st.sampled_from((b" ", b"=", b",", b"&", b";")))  # base64 and words have an end
    return draw(around) + gap + written + gap + draw(around), secret


@given(_make_texts(), st.sampled_from((b"X-Any", b"Cookie", b"Referer", b"Api-Key", b"")))
def test_nothing_of_cavvys_is_left_in_a_head(text: tuple[bytes, bytes], name: bytes) -> None:
    value, secret = text
    target, line = (b"/", name + b": " + value + b"\r\n")
    if not name:
        target, line = b"/" + value.replace(b" ", b"+"), b""
    head = b"GET %b HTTP/1.1\r\nHost: a\r\nX-A: b=%%41\r\n%b\r\n" % (target, line)
    cleaned, _, carries = _OWN.remove(head)
    assert carries == (secret == _SECRETS[0])
    assert not _OWN.holds(cleaned)
    assert cleaned.startswith(b"GET /")
    assert b" HTTP/1.1\r\nHost: a\r\nX-A: b=%41\r\n" in cleaned
    assert _OWN.remove(cleaned)[0] is cleaned


@given(st.lists(st.sampled_from((*_BETWEEN, b"cavvy_ab.", b"Y2F2dnk=", b"\r\nX-B: "))))
def test_a_head_without_values_of_cavvy_stays_as_it_is(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    head = b"GET /?%b HTTP/1.1\r\nHost: a\r\nCookie: c=1;;d\r\nX-A: %b\r\n\r\n"
    head %= (text.replace(b" ", b"").replace(b"\r\nX-B:", b""), text)
    cleaned, keys, carries = _OWN.remove(head)
    assert cleaned is head
    assert (list(keys), carries) == ([], False)


def test_heads_that_are_accepted_mean_the_same_to_another_parser() -> None:
    accepted = 0
    for data in make_requests(3, 3000):
        head = data[: data.find(b"\r\n\r\n") + 4]
        try:
            ours = parse_request(head, GatewayLimits())
            other = SecondOpinion(head)
        except (HeadError, httptools.HttpParserUpgrade):
            continue
        except httptools.HttpParserInvalidMethodError:
            continue  # it knows only some methods
        accepted += 1
        assert ours.method == other.method
        assert other.target.endswith(ours.target.lstrip(b"/"))
        fields = dict(other.fields)
        assert int(fields.get(b"content-length", 0)) == max(ours.length, 0)
        assert (ours.length == -1) == (b"transfer-encoding" in fields)
        assert {line.partition(b":")[0].lower() for line in ours.fields.split(b"\r\n")[:-1]} <= {
            *fields,
            b"host",
        }
    assert accepted > 300


@given(st.binary(max_size=300), st.lists(st.integers(1, 40)), st.lists(st.integers(1, 9)))
def test_a_chunked_body_is_read_however_it_is_cut(
    body: bytes, sizes: list[int], cuts: list[int]
) -> None:
    data, left = b"", body
    for size in [*sizes, 400]:
        piece, left = left[:size], left[size:]
        if piece:
            data += b"%X;a=b\r\n%b\r\n" % (len(piece), piece)
    data += b"0\r\nX: y\r\n\r\nnext"
    reader, found = ChunkedBody(), b""
    for cut in cuts:
        found += reader.feed(data[:cut]) if not reader.done else b""
        data = reader.rest + data[cut:] if reader.done else data[cut:]
    if not reader.done:
        found += reader.feed(data)
        assert reader.rest == b"next"
    assert found == body


_PIECES = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([as_chunk(b"hello"), b"hello\r\n", b"5\r\n", b"\r\n", b"x" * 3000]),
)


@given(st.lists(_PIECES, max_size=6), st.lists(st.integers(1, 60)), st.booleans())
def test_chunks_that_are_passed_on_as_they_are_leave_the_body_as_it_is(
    bodies: list[bytes], cuts: list[int], whole: bool
) -> None:
    """Some bodies look like chunks, and the cuts may be anywhere: `whole` cuts after each chunk."""
    written = [as_chunk(body) for body in bodies]
    reader, passed, found = ChunkedBody(), 0, b""
    data = b"".join(written)
    while data:
        cut = len(written.pop(0)) if whole else cuts.pop() if cuts else len(data)
        piece, data = data[:cut], data[cut:]
        if reader.is_whole_chunk(piece):
            passed += 1
            size, _, rest = piece.partition(b"\r\n")
            found += rest[: int(size, 16)]
        else:
            found += reader.feed(piece)
    assert found == b"".join(bodies)
    if whole:
        assert passed == sum(len(body) < 2048 for body in bodies)


@pytest.mark.parametrize(
    "data",
    [
        b"5;a=b\r\nhello\r\n",  # extensions are not passed on
        b"05\r\nhello\r\n",
        b"A\r\n0123456789\r\n",
        b"+5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\r\nhello\n\n",
        b"5\r\nhell\r\n",
        b"5\r\nhello!\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"\r\n",
        b"",
    ],
)
def test_other_bytes_are_not_passed_on_as_they_are(data: bytes) -> None:
    assert ChunkedBody().is_whole_chunk(b"5\r\nhello\r\n")
    assert not ChunkedBody().is_whole_chunk(data)


@pytest.mark.parametrize(
    "before", [b"d\r\nab", b"5", b"0\r\n"], ids=["in a chunk", "in a size", "in the trailers"]
)
def test_bytes_that_only_look_like_a_chunk_are_not_passed_on_as_they_are(before: bytes) -> None:
    reader = ChunkedBody()
    reader.feed(before)
    assert not reader.is_whole_chunk(b"5\r\nhello\r\n")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"5\n"], "the size of a chunk"),
        ([b"hello\r\n"], "the size of a chunk"),
        ([b"5;", b"x" * 300], "the size of a chunk"),
        ([b"5\r\nhello!\r\n"], "the stated size"),
        ([b"5\r\nhel", b"lo\r", b"!"], "the stated size"),
        ([b"0\r\n", b"5\r\nhello\r\n\r\n"], "the trailers"),
        ([b"0\r\nX: ", b"y" * 9000], "the trailers"),
    ],
)
def test_the_first_invalid_byte_of_a_chunked_body_ends_it(
    pieces: list[bytes], message: str
) -> None:
    reader = ChunkedBody()
    for piece in pieces[:-1]:
        reader.feed(piece)
    with pytest.raises(HeadError, match=message):
        reader.feed(pieces[-1])


def test_a_size_may_be_cut_after_a_long_chunk() -> None:
    reader = ChunkedBody()
    assert reader.feed(as_chunk(b"x" * 400) + b"5") == b"x" * 400
    assert reader.feed(b"\r\nhello\r\n") == b"hello"


@given(st.binary(max_size=30), st.lists(st.integers(1, 9)))
def test_a_body_of_a_known_length_ends_there(body: bytes, cuts: list[int]) -> None:
    reader, data, found = make_body(len(body)), body + b"next", b""
    for cut in [*cuts, len(data)]:
        if not reader.done:
            found += reader.feed(data[:cut])
            data = data[cut:]
    assert reader.done
    assert (found, reader.rest + data) == (body, b"next")


def test_the_head_tells_how_its_body_ends() -> None:
    assert isinstance(make_body(NO_LENGTH), ChunkedBody)
    to_close = make_body(UNTIL_CLOSE)
    assert to_close.feed(b"0\r\n\r\n") == b"0\r\n\r\n"
    assert not to_close.done


def test_the_least_loaded_replica_is_chosen_in_turns() -> None:
    assert [choose_least([load], 0) for load in (0, 5, FULL)] == [0, 0, -1]
    assert choose_least([FULL, 2 * FARTHER + 5, FARTHER + 9], 0) == 2, "nearer ones come first"
    assert choose_least([FULL, 2 * FARTHER + 5], 0) == 1
    assert choose_least([], 0) == -1
    assert choose_least([FULL, FULL], 1) == -1
    assert choose_least([3, 1, 2], 0) == 1
    assert [choose_least([1, 1, 1], start) for start in range(3)] == [0, 1, 2]
    assert choose_least([0, 1, 1], 2) == 0


def test_a_key_keeps_its_replica_until_it_is_overloaded() -> None:
    ring = make_ring(["a", "b", "c", "d"])
    keys = [hash_key(b"%d" % number) for number in range(400)]
    idle = [choose_by_key(ring, key, [0, 0, 0, 0], 0, 1.25) for key in keys]
    assert {idle.count(position) > 40 for position in range(4)} == {True}
    fewer = make_ring(["a", "b", "c"])
    moved = [choose_by_key(fewer, key, [0, 0, 0], 0, 1.25) for key in keys]
    assert all(now == before for now, before in zip(moved, idle, strict=True) if before < 3)
    loads = [10 if position == idle[0] else 2 for position in range(4)]
    assert choose_by_key(ring, keys[0], loads, sum(loads), 1.25) != idle[0]
    assert choose_by_key(ring, keys[0], [FULL] * 4, 0, 1.25) == -1
    busy = [choose_by_key(ring, key, [9, 9, 9, 9], 0, 1.25) for key in keys]
    assert busy == idle, "all have more than their share, and room"


def test_a_key_whose_replica_is_full_goes_where_it_would_go_without_this_replica() -> None:
    names = ["a", "b", "c", "d"]
    for number in range(100):
        key = hash_key(b"%d" % number)
        own = choose_by_key(make_ring(names), key, [0, 0, 0, 0], 0, 1.25)
        others = [name for name in names if name != names[own]]
        then = others[choose_by_key(make_ring(others), key, [0, 0, 0], 0, 1.25)]
        loads = [FULL if position == own else 0 for position in range(4)]
        assert names[choose_by_key(make_ring(names), key, loads, 0, 1.25)] == then
    assert choose_by_key(make_ring([]), 7, [], 0, 1.25) == -1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.sampled_from([1.0, 1.25, 2.0]))
def test_no_replica_has_more_than_its_share_of_the_keys(keys: list[int], factor: float) -> None:
    ring, loads = make_ring(["a", "b", "c"]), [0, 0, 0]
    for number, key in enumerate(keys):
        loads[choose_by_key(ring, hash_key(b"%d" % key), loads, number, factor)] += 1
        assert max(loads) <= math.ceil(factor * sum(loads) / 3)


@given(st.integers(0, 10**10))
def test_a_bucket_is_at_most_a_quarter_above_its_latencies(latency_us: int) -> None:
    bound = upper_bound_of(bucket_of(latency_us))
    assert latency_us < bound <= max(latency_us * 1.25 + 1, 4)


def test_quantiles_come_from_buckets() -> None:
    assert find_quantile({}, 0.5) is None
    assert find_quantile({bucket_of(100): 9, bucket_of(90_000): 1}, 0.5) < 0.00013
    assert find_quantile({bucket_of(100): 9, bucket_of(90_000): 1}, 0.99) > 0.09


def test_a_rate_has_a_burst_and_then_its_pace() -> None:
    bucket = TokenBucket(2.0, 3, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert bucket.take(0.5) == 0
    assert [bucket.take(100.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert [bucket.take(at) for at in (100.25, 100.5, 100.5)] == [0.25, 0, 0.5]


def test_clients_are_counted_by_their_key_or_else_by_their_address() -> None:
    head = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", GatewayLimits())
    rates = ServiceRates([RateLimit(per_s=1, burst=1, each="client")])

    def take(key: str, peer: bytes) -> bool:
        return rates.take(head, b"/", key, peer, 0.0) is None

    assert [take("k", b"1"), take("k", b"2"), take("", b"1")] == [True, False, True]
    assert [take("", b"1"), take("", b"2")] == [False, True]


def test_of_too_many_addresses_the_one_that_was_silent_for_longest_is_forgotten() -> None:
    head = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", GatewayLimits())
    rates = ServiceRates([RateLimit(per_s=0.001, burst=1, each="address")])

    def take(number: int) -> bool:
        return rates.take(head, b"/", "", b"%d" % number, 0.0) is None

    assert all(take(number) for number in range(10_000))
    assert not take(0)
    assert take(10_000)
    assert [take(10_000), take(0), take(2)] == [False, False, False]
    assert take(1), "it was forgotten"


def test_a_request_that_one_limit_refuses_counts_in_no_limit() -> None:
    head = parse_request(b"GET /v1/x HTTP/1.1\r\nHost: a\r\n\r\n", GatewayLimits())
    rates = ServiceRates(
        [
            RateLimit(per_s=1, burst=2, each="service"),
            RateLimit(per_s=1, burst=1, each="address", prefix="/v1"),
        ]
    )

    def take(peer: bytes, target: bytes = b"/v1/x") -> int:
        found = rates.take(head, target, "", peer, 0.0)
        return 0 if found is None else found[1]

    assert [take(b"a"), take(b"a"), take(b"a"), take(b"b"), take(b"c")] == [0, 1, 1, 0, 1]
    assert rates.take(head, b"/v1x", "", b"a", 1.0) is None, "the prefix is a whole part"


@pytest.mark.parametrize(
    ("cold", "waited", "ready", "backlog", "expected"),
    [
        (None, 0, 0, 5, None),
        (40, 10, 0, 5, 30),
        (40, 55, 0, 5, 55),
        (40, 0, 2, 10, 5),
        (None, 0, 1, 0, 1),
    ],
)
def test_retry_after_is_what_is_left(
    cold: float | None, waited: float, ready: int, backlog: int, expected: int | None
) -> None:
    found = estimate_retry_s(
        cold_start_s=cold, waited_s=waited, ready=ready, backlog=backlog, slots=4, service_s=2.0
    )
    assert found == expected


def test_preferences_that_are_not_valid_are_ignored() -> None:
    assert read_prefer(b"respond-async, wait=10") == Preferences(respond_async=True, wait_s=10)
    assert read_prefer(b"wait=-1, handling=lenient;x, =") == Preferences()


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/a?b=//", "/%76%31/a", "//v1/a", "/./v1/a", "/x/../v1/a", "/v1%2Fa", "/v1/"]
)
def test_a_limit_below_a_path_holds_however_the_path_is_written(path: str) -> None:
    head = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", GatewayLimits())
    rates = ServiceRates([RateLimit(per_s=1, burst=1, each="service", prefix="/v1")])
    assert rates.take(head, path.encode(), "", b"", 0.0) is None
    assert rates.take(head, b"/v1/b", "", b"", 0.0) is not None
    assert rates.take(head, b"/v10/%61", "", b"", 0.0) is None, "it is not below /v1"


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key", "X-Forwarded-For", "X-User"])
def test_requests_are_counted_by_headers_that_do_not_go_on_too(name: str) -> None:
    rates = ServiceRates([RateLimit(per_s=1, burst=1, each="header", header=name.lower())])

    def call(value: str) -> bool:
        text = f"GET / HTTP/1.1\r\nHost: a\r\n{name}: {value}\r\n\r\n"
        head = parse_request(text.encode(), GatewayLimits())
        return rates.take(head, b"/", "", b"", 0.0) is None

    assert [call("a"), call("b"), call("a")] == [True, True, False]


SAME = b"Host: a\r\nUser-Agent: u\r\n%bAccept: */*\r\n\r\n"


def describe_head(head: RequestHead | HeadError) -> object:
    return head.status if isinstance(head, HeadError) else vars(head)


def parse_with(memo: HeadMemo, data: bytes) -> RequestHead | HeadError:
    try:
        return memo.parse_request(data)
    except HeadError as error:
        return error


@pytest.mark.parametrize("first", [b"", b"Content-Length: 7\r\n", b"content-length: 12\r\n"])
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_a_head_with_known_fields_is_read_as_if_it_was_parsed(first: bytes, method: bytes) -> None:
    """Only the target and the digits of a length may differ from a head that was parsed."""
    memo = HeadMemo(GatewayLimits())
    lines = (
        *(b"", b"Content-Length: 7\r\n", b"Content-Length: 345\r\n", b"content-length: 6\r\n"),
        *(b"Content-Length: \r\n", b"Content-Length: 0\r\n", b"Content-Length: 1x\r\n"),
        *(b"Content-Length: 1\r\nContent-Length: 1\r\n", b"Content-Length:  7\r\n"),
        *(b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", b"content-length: 7 \r\n"),
        *(b"X-Content-Length: 7\r\n", b"Content-Length: 9999999999999999999\r\n"),
        *(b"Authorization: Bearer k\r\n", b"Connection: close\r\n", b"Prefer: wait=1\r\n"),
    )
    targets = (
        *(b"/x", b"/y?a=1", b"/y?key=cavvysvc_abc&b=1", b"/%63avvysvc_abc", b"/a#b", b"*", b"x"),
        *(b"http://b/z", b"/\x7f", b"/\xff", b"/a b", b"//v1/%61"),
    )
    versions = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2")
    parse_with(memo, b"%b /first HTTP/1.1\r\n%b" % (method, SAME % first))
    for target, line, version in itertools.product(targets, lines, versions):
        data = b"%b %b %b\r\n%b" % (method, target, version, SAME % line)
        alone = parse_with(HeadMemo(GatewayLimits()), data)
        for found in (parse_with(memo, data), parse_with(memo, data)):
            assert describe_head(found) == describe_head(alone), data


def test_fields_are_parsed_once_for_all_targets_and_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[bytes] = []

    def parse(data: bytes, limits: GatewayLimits) -> RequestHead:
        parsed.append(data)
        return parse_request(data, limits)

    monkeypatch.setattr(heads, "parse_request", parse)
    memo = HeadMemo(GatewayLimits())
    for number in range(1, 2000):
        line = b"Content-Length: %d\r\n" % number
        head = memo.parse_request(b"POST /x?%d HTTP/1.1\r\n%b" % (number, SAME % line))
        assert (head.target, head.length) == (b"/x?%d" % number, number)
        assert head.fields == (SAME % line)[:-2]
    assert len(parsed) == 1
    assert head.plain
    for field in (b"X-API-Key: k\r\n", b"Origin: http://a\r\n", b"Prefer: wait=1\r\n"):
        assert not memo.parse_request(b"GET / HTTP/1.1\r\n" + SAME % field).plain


@given(st.text(alphabet="cCaAvVyY%24/aF-9ZxkT3wQY2FdnN_", max_size=40).map(str.encode))
def test_a_short_text_is_searched_as_a_long_one_is(text: bytes) -> None:
    own = OwnValues(describe_owner("-9Zx" + "kT3wQ" * 7 + "w_8k"))
    for sign in (b"", *own.signs, b"CaVvY", b"%41"):
        short = text + sign
        assert own.may_hold(short) is own.may_hold(short + b"/" * 200)
