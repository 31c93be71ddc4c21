"""Builds the commands that users paste into a machine's shell to join the machine to Cavvy."""

import json
import shlex
from datetime import datetime

from cavvy.providers.abilities import JoinInvitation
from cavvy.providers.base import NodeEndpoint

_WRONG_SERVER = "the server's certificate does not match this command; nothing was run"


def make_invitation(
    node_endpoint: NodeEndpoint, provider: str, token: str, expires: datetime
) -> JoinInvitation:
    """Return a shell command and a Python command, either of which joins a machine. The command
    fetches the join script over TLS, and runs the script only if the server has the pinned
    certificate.
    """
    host, _, port = node_endpoint.address.removeprefix("https://").rpartition(":")
    path = f"/nodes/v1/{provider}/script"
    # makes a Python literal without single quotes, because the command is in single quotes
    text = json.dumps
    program = (
        "import hashlib,http.client as h,ssl,subprocess as s,sys;"
        f"c=h.HTTPSConnection({text(host.strip('[]'))},{int(port)},"
        "context=ssl._create_unverified_context());"
        "c.connect();"
        f"hashlib.sha256(c.sock.getpeercert(True)).hexdigest()=={text(node_endpoint.pin)} or "
        f"sys.exit({text(_WRONG_SERVER)});"
        f"c.request({text('GET')},{text(path)});"
        f"s.run([{text('sh')},{text('-s')},{text('--')},{text(token)}],"
        "input=c.getresponse().read())"
    )
    url = f"{node_endpoint.address}{path}"
    return JoinInvitation(
        shell=f"curl -fsSk --pinnedpubkey '{node_endpoint.key_pin}' {url} | sh -s -- {token}",
        python=f"python3 -c {shlex.quote(program)}",
        expires_at=expires,
    )
