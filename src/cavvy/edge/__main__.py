"""`python -m cavvy.edge FOLDER [ADDRESS PIN]`: enrols this device with the token in the variable
CAVVY_EDGE_TOKEN, unless it has enrolled, and runs its program. Other users of the device could read
a token among the arguments."""

from __future__ import annotations

import os
import sys

from cavvy.edge.device import DeviceOptionInvalid, enrol, hold, run
from cavvy.edge.server_calls import DeviceRefused
from cavvy.edge.tasks import say


def main(arguments: list[str]) -> int:
    folder, *server = arguments
    token = os.environ.pop("CAVVY_EDGE_TOKEN", "")
    try:
        hold(folder)
        if server:
            card = enrol(folder, server[0], server[1], token)
            say(f"enrolled as {card['device']} of site {card['site']}")
    except DeviceOptionInvalid as error:
        say(f"not started: {error}")
        return 1
    except (OSError, ValueError, DeviceRefused) as error:
        say(f"not enrolled: {error}")
        return 1
    return run(folder)


if __name__ == "__main__":
    os.umask(0o077)  # not in `main`: tests call it in their own process
    sys.exit(main(sys.argv[1:]))
