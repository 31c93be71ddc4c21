"""Finds the values in the heads of requests that are Cavvy's own, and removes them before a program
gets the request: the cookies of the console, tokens of accounts, the owner's token, and keys of
services.

A browser sends the console's cookie to every port of a host, and people send a token or a key to
the wrong URL, or where their program expects a key. A program that got one of these values could
act as its owner. Values are found as they are, percent-encoded, and in base64. The other bytes of a
head stay as they are.
"""

import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from cavvy.capabilities.serving.gateway.config import OwnerToken

_VALUE = re.compile(rb"cavvysvc_[A-Za-z0-9_-]*|cavvy_[A-Za-z0-9_-]{16,}")
_SERVICE_KEY = re.compile(rb"cavvysvc_[A-Za-z0-9_-]*")
# Names of the console's cookies. Servers and browsers differ in the characters that they strip
# from a name, so all of these are ignored.
OWN_COOKIE = rb"(?i:[^0-9a-z\r]*(?:(?:host|secure|http)-)*cavvy-)"
_OWN_COOKIE = re.compile(OWN_COOKIE)
# characters that no program needs to encode (RFC 3986, 2.3), and an encoded `%`
ENCODED = r"%(?:25|2[dD]|3[0-9]|[46][1-9a-fA-F]|[57][0-9aA]|5[fF])"
_ENCODED = re.compile(ENCODED.encode())
_START = 8  # characters of the owner's token that the gateway knows; 35 more stay secret
_EMPTY = b" \t,;\"'"  # what may be left of a value that was only a secret
_SHORT = 128  # bytes up to which one search is quicker than one for each sign
_MOST_DECODED = 3  # times that a value may be encoded
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{8,80}")  # longer than a token
_MOST_RUNS = 100  # that are decoded in one value
_OF_CREDENTIALS = re.compile(rb"auth|key|token|secret|passw|credential")
_SEPARATOR = re.compile(rb"([&;])")
# fields that decide how the message is read, or that are not passed on as they are
_LEFT = frozenset({b"content-length", b"transfer-encoding", b"connection", b"host", b"expect"})
# the fields for keys, which `admission` passes on or not
_KEY_FIELDS = frozenset({b"authorization", b"x-api-key"})
# browsers send these by themselves, so a key in them does not show that the page may use it
_BY_ITSELF = frozenset({b"cookie", b"referer"})


class OwnValues:
    """`owner` describes the owner's token, which has no fixed beginning."""

    def __init__(self, owner: OwnerToken | None = None) -> None:
        self._owner = owner
        words = ("cavvy", *([owner.start] if owner else []))
        # what the words become in base64 -> the number of characters before it in its group
        self._coded = {sign: lead for word in words for sign, lead in _write_coded(word)}
        self.signs = (*(each.encode() for each in words), *self._coded)
        # the same for short texts, in one search that begins only at their first letters
        first = re.escape(bytes({sign[0] for sign in self.signs} | set(b"C%")))
        anywhere = rb"|".join((b"(?i:cavvy)", ENCODED.encode(), *map(re.escape, self.signs)))
        self._any_sign = re.compile(rb"(?=[" + first + rb"])(?:" + anywhere + rb")")

    def remove(self, head: bytes) -> tuple[bytes, Sequence[bytes], bool]:
        """Return a request's head without Cavvy's own values, the keys of services in it except
        those that a browser sends by itself, and whether it contains any key of a service. Only
        `Authorization` and `X-API-Key` keep their values. If nothing was removed, the head is the
        same object.
        """
        if not self.may_hold(head):
            return head, (), False
        start, *lines = head.split(b"\r\n")
        keys: list[bytes] = []
        parts = start.split(b" ")
        if len(parts) == 3:
            parts[1] = self._clean_url(parts[1], keys)
        cleaned = [b" ".join(parts)]
        for line in lines:
            kept = self._clean_line(line, keys)
            if kept is not None:
                cleaned.append(kept)
        data = b"\r\n".join(cleaned)
        carries = bool(keys) or any(_SERVICE_KEY.search(each) for each in self._read(head))
        return (head if data == head else data), keys, carries

    def may_hold(self, data: bytes) -> bool:
        """Return False if `data` certainly contains none of the values."""
        if len(data) <= _SHORT:
            return self._any_sign.search(data) is not None
        if b"cavvy" in data.lower():
            return True
        for sign in self.signs:
            if sign in data:
                return True
        return b"%" in data and _ENCODED.search(data) is not None

    def holds(self, value: bytes) -> bool:
        """Return whether a value contains one of Cavvy's own, in any form."""
        return self.may_hold(value) and any(self._find(each) for each in self._read(value))

    def _find(self, text: bytes) -> bytes:
        """Return the first own value in a text, or b""."""
        if found := _VALUE.search(text):
            return found[0]
        if (owner := self._owner) is not None:
            start = owner.start.encode()
            at = text.find(start)
            while at >= 0:
                token = text[at : at + owner.length]
                if sha256(token).hexdigest() == owner.sha256:
                    return token
                at = text.find(start, at + 1)
        return b""

    def _clean_line(self, line: bytes, keys: list[bytes]) -> bytes | None:
        """Return the line of a field, or None if the field must be removed."""
        name, colon, value = line.partition(b":")
        lower = name.lower()
        if lower in _LEFT or not self.may_hold(line):
            return line
        if lower == b"cookie":
            value = self._clean_cookies(value)
            return name + colon + value if value.strip(b" \t;,") else None
        if self.holds(name):
            return None
        if not self.holds(value):
            return line
        if lower not in _BY_ITSELF:
            self._add_keys(value, keys)
        if lower in _KEY_FIELDS:
            return line
        if lower == b"sec-websocket-protocol":
            value = b",".join(each for each in value.split(b",") if not self.holds(each))
        elif _OF_CREDENTIALS.search(lower):
            return None
        elif b"://" in value:
            value = self._clean_url(value, [])
        value = self._cut(value)
        return name + colon + value if value else None

    def _cut(self, value: bytes) -> bytes:
        """Return a value without Cavvy's own, or b"" if nothing else can be kept."""
        value = _VALUE.sub(b"", value)
        if owner := self._find(value):
            value = value.replace(owner, b"")
        return b"" if self.holds(value) or not value.strip(_EMPTY) else value

    def _cut_pair(self, pair: bytes) -> bytes:
        """Return a parameter or cookie without Cavvy's own values, or b"" if its value is empty
        then.
        """
        if not self.holds(pair):
            return pair
        name, mark, value = pair.partition(b"=")
        value = b"" if self.holds(name) else self._cut(value)
        return name + mark + value if value else b""

    def _clean_url(self, url: bytes, keys: list[bytes]) -> bytes:
        """Return a URL or its path and query without the parts that contain an own value."""
        if not self.holds(url):
            return url
        self._add_keys(url, keys)
        path, mark, query = url.partition(b"?")
        if self.holds(path):
            path = b"/".join(self._cut(each) for each in path.split(b"/"))
        kept = b""
        pieces = [b"", *_SEPARATOR.split(query)]  # each with the separator before it
        for separator, piece in zip(pieces[::2], pieces[1::2], strict=True):
            cut = self._cut_pair(piece)
            if cut or not piece:
                kept += (separator if kept else b"") + cut
        return path + mark + kept if kept or not query else path

    def _clean_cookies(self, value: bytes) -> bytes:
        kept = []
        for pair in value.split(b";"):
            parts = [each for each in pair.split(b",") if not self._is_own_cookie(each)]
            is_own = not (parts and pair.startswith(parts[0]))
            cut = b"" if is_own else self._cut_pair(b",".join(parts))
            if cut or not pair:
                kept.append(cut)
        return b";".join(kept)

    def _is_own_cookie(self, pair: bytes) -> bool:
        return bool(
            _OWN_COOKIE.match(pair) or (b"%" in pair and _OWN_COOKIE.match(unquote_to_bytes(pair)))
        )

    def _add_keys(self, value: bytes, keys: list[bytes]) -> None:
        for text in self._read(value):
            if found := _SERVICE_KEY.search(text):
                keys.append(found[0])
                return

    def _read(self, value: bytes) -> Iterator[bytes]:
        """Yield the texts as which a program could read a value."""
        for _ in range(_MOST_DECODED + 1):
            yield value
            for sign, lead in self._coded.items():
                at = -1
                for _ in range(_MOST_RUNS):
                    at = value.find(sign, at + 1)
                    if at < 0:
                        break
                    if (run := _BASE64.match(value, max(at - lead, 0))) is not None:
                        yield _decode(run[0])
            if b"%" not in value:
                return
            value = unquote_to_bytes(value)


def _decode(run: bytes) -> bytes:
    plain = run.replace(b"-", b"+").replace(b"_", b"/")
    plain = plain[:-1] if len(plain) % 4 == 1 else plain
    return b64decode(plain + b"=" * (-len(plain) % 4))


def describe_owner(token: str) -> OwnerToken | None:
    """Return what the gateway must know to recognise the token, or None without a token."""
    if len(token) <= _START:
        return None
    digest = sha256(token.encode()).hexdigest()
    return OwnerToken(start=token[:_START], length=len(token), sha256=digest)


def _write_coded(word: str) -> Iterator[tuple[bytes, int]]:
    """Yield what the word becomes in base64 after any number of other bytes, without the characters
    that also depend on these bytes, and the number of characters before it in its group of four.
    """
    for before in range(3):
        text = urlsafe_b64encode(b"\0" * before + word.encode() + b"\0\0")
        lead = (before * 8 + 5) // 6
        sign = text[lead : (before + len(word)) * 8 // 6]
        for each in {sign, sign.replace(b"-", b"+").replace(b"_", b"/")}:
            yield each, lead
