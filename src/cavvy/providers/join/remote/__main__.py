"""Starts the program of a joined machine: `python -I -S far.pyz ADDRESS PIN PROVIDER FOLDER
PYTHON`, with the join token in CAVVY_JOIN_TOKEN.

The package is loaded under its own name from the archive that contains this file.
"""

import os
import sys

if __name__ == "__main__":
    package = type(sys)("cavvy_remote")
    package.__path__ = [
        os.path.dirname(os.path.abspath(__file__))
    ]  # marks this folder as a package
    sys.modules["cavvy_remote"] = package
    # the package exists from the line above on
    from cavvy_remote.machine import main  # type: ignore[import-not-found]

    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
