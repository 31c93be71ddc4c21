"""The main program of a function's job.

`python3 serve.py APP.json SOCKET [NAME]`. NAME is the function or class that is called first; its
process begins before the broker imports what it needs. See `broker.py`.
"""

import os
import sys

if __name__ == "__main__":  # the root of the files that were sent with the working folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from cavvy.capabilities.functions.on_node.start import start_first


def main() -> None:
    """Run the broker."""
    spec_file, meet, *first = sys.argv[1:]
    spec_file = os.path.abspath(spec_file)
    begun = start_first(spec_file, first[0]) if first else None
    from cavvy.capabilities.functions.on_node.broker import run_broker

    run_broker(spec_file, meet, begun)


if __name__ == "__main__":
    main()
