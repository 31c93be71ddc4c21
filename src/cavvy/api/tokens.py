"""Creates and checks tokens.

Access tokens and service keys contain 256 random bits. Only the SHA-256 of a token is stored. An
attacker would have to try 2^255 tokens on average to find the token of a hash. Tokens are random,
so a slow hash, which passwords need, would not add security. A token of a gang is an HMAC of the
gang's name with a secret of this installation, so tokens of gangs need not be stored.
"""

import base64
import hmac
import os
import secrets
from hashlib import sha256
from string import ascii_letters, digits

from starlette.requests import Request

from cavvy.api.errors import ApiProblem
from cavvy.client.state import write_private
from cavvy.domain.jobs import Attempt, NodeProof

_BYTES = 32  # 256 bits, of tokens and of the installation's secret
_DIGITS = 18  # of the numbers in an agent's own token
_CACHED = 16_384  # maximum number of verified tokens that are cached, each about 200 bytes
PREFIX = "cavvy_"  # lets scanners for leaked secrets recognize tokens
_CHARACTERS = ascii_letters + digits
_RANDOM = 43  # characters of a token or a key: 256 bits, as 62**43 is more than 2**256
_LENGTH = len(PREFIX) + _RANDOM  # also that of older tokens, in base64 without padding


class GangTokens:
    """Creates and checks the tokens of gangs."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # OpenSSL's HMAC lets other threads run. Without the cache, each request of an agent would
        # make the event loop wait until a thread of the store releases the interpreter lock. The
        # cache contains only tokens that an agent has presented, because anyone can send names of
        # gangs, which may be as long as a request's body.
        self._checked: dict[tuple[str, NodeProof | None], str] = {}  # by gang and node

    def of(self, gang: str) -> str:
        """Return the token with which agents of this gang first claim their ranks, and which agents
        without tokens of their own send with each request.
        """
        digest = hmac.digest(self._key, b"gang\0" + gang.encode("utf-8", "surrogatepass"), sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def of_claim(self, gang: str, rank: int) -> str:
        """Return the token with which an agent first claims this rank. The token is valid only for
        the claim.
        """
        text = b"claim\0" + gang.encode("utf-8", "surrogatepass") + b"\0%d" % rank
        return base64.urlsafe_b64encode(hmac.digest(self._key, text, sha256)).rstrip(b"=").decode()

    def of_peer(self, text: str) -> str:
        """Return this server's signature of the text, which the other servers verify."""
        digest = hmac.digest(self._key, b"peer\0" + text.encode("utf-8", "surrogatepass"), sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def prove(self, purpose: str, text: str) -> str:
        """Return the proof that this installation has issued a text for a capability's purpose."""
        digest = hmac.digest(
            self._key, b"%b\0" % purpose.encode() + text.encode("utf-8", "surrogatepass"), sha256
        )
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def of_node(self, gang: str, proof: NodeProof) -> str:
        """Return the token that an agent gets with its work, and uses from then on. It is valid
        until the agent's node is replaced.
        """
        text = b"node\0" + gang.encode("utf-8", "surrogatepass")
        text += b"\0%d\0%d" % (proof.rank, proof.round)
        digest = base64.urlsafe_b64encode(hmac.digest(self._key, text, sha256)).rstrip(b"=")
        return f"{proof.rank}.{proof.round}.{digest.decode()}"

    def check_claim(self, request: Request, gang: str, rank: int, attempt: Attempt | None) -> str:
        """Return the token that the agent must use from now on. Raises ApiProblem if the request's
        token does not entitle to claim this rank. `attempt` is the attempt that has the gang, if
        there is one. After a repair, an agent needs a token of its own, or one that was made for
        the node with which the repair has replaced that of the rank.
        """
        shown = request.scope.get("gang_token", "").encode("latin-1")
        round_ = attempt.rounds.get(rank, 0) if attempt else 0
        proof = NodeProof(rank, round_)
        own, name = self.of_node(gang, proof), f"{gang}#{round_}" if round_ else gang
        fits = [own]
        if round_ or attempt is None or not attempt.rounds or rank in attempt.open_ranks:
            fits += [self.of_claim(name, rank), self.of(name)]
        if not any([hmac.compare_digest(shown, each.encode()) for each in fits]):
            if attempt is not None and attempt.rounds:
                self.check(request, gang)
                raise ApiProblem("claimed", "the agent's node was lost, and replaced by another")
            raise ApiProblem("forbidden", "the token belongs to another gang")
        return own

    def check(self, request: Request, gang: str) -> NodeProof | None:
        """Raise ApiProblem unless the request has a token of this gang. Return what the token
        proves; None if all agents of the gang may have it.
        """
        shown = request.scope.get("gang_token", "")
        proof = _read_proof(shown)
        known = self._checked.get((gang, proof))
        token = known or (self.of_node(gang, proof) if proof else self.of(gang))
        if not hmac.compare_digest(shown.encode("latin-1"), token.encode()):
            raise ApiProblem("forbidden", "the token belongs to another gang")
        if known is None:
            if len(self._checked) >= _CACHED:
                del self._checked[next(iter(self._checked))]
            self._checked[gang, proof] = token
        return proof

    def check_attempt(self, request: Request, attempt: Attempt) -> None:
        """Raise ApiProblem if the agent's node was replaced, or if the gang was repaired and the
        agent has no token of its own.
        """
        if attempt.rounds:
            proof = self.check(request, attempt.gang)
            if proof is None or not proof.is_current(attempt):
                raise ApiProblem("claimed", "the agent's node was lost, and replaced by another")


def _read_proof(token: str) -> NodeProof | None:
    """Return what a token says, which its digest must prove."""
    rank, _, rest = token.partition(".")
    number, dot, _ = rest.partition(".")
    if not (dot and rank.isdecimal() and number.isdecimal() and len(rank + number) <= _DIGITS):
        return None
    return NodeProof(int(rank), int(number))


def load_tokens(path: str) -> GangTokens:
    """Load the installation's secret from the file, which is created at the first use. If the file
    is lost, the tokens of all running agents become invalid.
    """
    try:
        with open(path, "rb") as file:
            key = file.read()
    except FileNotFoundError:
        key = b""
    if len(key) != _BYTES:
        key = os.urandom(_BYTES)
        write_private(path, key)
    return GangTokens(key)


def make_token(prefix: str = PREFIX) -> str:
    """Return a new token, or another secret with its own prefix. It is shown once and not stored.
    A double click selects its letters and digits as a whole.
    """
    return prefix + "".join(secrets.choice(_CHARACTERS) for _ in range(_RANDOM))


def hash_token(token: str) -> str:
    """Return the hash under which a token is stored."""
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def is_token(text: str) -> bool:
    """Return whether the text has the form of a token. The server looks up only texts of this form
    in the database.
    """
    return len(text) == _LENGTH and text.startswith(PREFIX)
