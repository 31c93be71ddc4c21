"""`python -m cavvy.edge FOLDER [ADDRESS PIN TOKEN]`: enrols this device, unless it has enrolled,
and runs its program."""

from __future__ import annotations

import os
import sys

from cavvy.edge.device import enrol, run, say
from cavvy.edge.server_calls import DeviceRefused


def main(arguments: list[str]) -> int:
    os.umask(0o077)
    folder, *server = arguments
    if server:
        try:
            card = enrol(folder, *server)
        except (OSError, DeviceRefused) as error:
            say(f"not enrolled: {error}")
            return 1
        say(f"enrolled as {card['device']} of site {card['site']}")
    return run(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
