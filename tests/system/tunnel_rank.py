"""One rank of a gang in a network namespace of its own: makes its key, opens the tunnel, and sends
a text to the next rank through it. `test_tunnel` starts it.
"""

import json
import socket
import sys
from pathlib import Path

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.tunnel import TunnelOffer, check_tunnel, close_tunnel, open_tunnel


def main(home: str, rank: int) -> None:
    """Prints what this rank offers, reads the work, and prints what it has received."""
    print(json.dumps(TunnelOffer(home).facts()), flush=True)
    work = read_work(ConfigFields(json.loads(sys.stdin.readline()), "work"))
    fields = {"protocol": 1, "gang": "g", "rank": rank, "address": "unix:/s", "token": "t"}
    more = {"home": home, "cache": home, "node_address": "-", "lease_s": 60}
    config = AgentConfig(ConfigFields({**fields, **more}, "configuration"))
    assert work.tunnel is not None
    fault = open_tunnel(config, work.tunnel)
    if fault:
        raise SystemExit(fault)
    try:
        check_tunnel(config, work)
        print("open", flush=True)
        where = (work.addresses[0], work.master_port)
        if rank == 0:
            with socket.create_server(where) as server:
                print(server.accept()[0].recv(99).decode(), flush=True)
        else:
            sys.stdin.readline()  # rank 0 listens
            with socket.create_connection(where, 20) as sender:
                sender.sendall(Path(home, "planted").read_bytes())
    finally:
        close_tunnel(config)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
