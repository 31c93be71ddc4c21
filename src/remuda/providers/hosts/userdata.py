"""User data for machines that a cloud starts: one script for all nodes of a gang, without secrets that last."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from remuda.providers.base import GangSpec, Outside
from remuda.providers.notices import NoticeSource, NoticeToken, make_notice_fields

_SCRIPT, _PYTHON = Path(__file__).with_name("userdata.sh"), Path(__file__).with_name("boot.py")
_MOST_TOKENS = 64  # in the script itself: clouds limit it to some KiB
PATIENCE = timedelta(minutes=15)  # how long a node tries to reach the control plane before it ends itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Where a node learns who it is, from its cloud's metadata service: its place in the launch, its own address."""

    rank: str
    address: str
    token: NoticeToken | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def make_user_data(gang: GangSpec, outside: Outside, metadata: Metadata, notices: Sequence[NoticeSource] = ()) -> str:
    """The script. Packs the agent when it is asked for the first time, which blocks."""
    tokens = [outside.claim_token(gang.name, rank) for rank in range(gang.nodes)]
    boot = {
        "address": outside.address,
        "agent": outside.agent(),
        "tokens": tokens if gang.nodes <= _MOST_TOKENS else outside.shelve(json.dumps(tokens).encode()),
        "patience_s": PATIENCE.total_seconds(),
        "metadata": {
            "rank": metadata.rank,
            "address": metadata.address,
            "headers": dict(metadata.headers),
            "token": metadata.token
            and {
                "url": metadata.token.url,
                "header": metadata.token.header,
                "method": metadata.token.method,
                "headers": dict(metadata.token.headers),
            },
        },
        "config": {
            "protocol": 1,
            "gang": gang.name,
            "pin": outside.pin,
            "lease_s": gang.lease.total_seconds(),
            "grace_s": gang.grace.total_seconds(),
            "notices": make_notice_fields(notices),
        },
    }
    pythons = "\n".join(f'    "{where}") hash={digest} ;;' for where, digest in sorted(outside.pythons().items()))
    script = _SCRIPT.read_text("utf-8")
    for mark, text in (
        ("@BOOT@", json.dumps(boot, sort_keys=True)),
        ("@PYTHONS@", pythons),
        ("@PYTHON@", _PYTHON.read_text("utf-8").strip()),
        ("@ADDRESS@", outside.address),
    ):
        script = script.replace(mark, text)
    return script
