"""Starts the agent: `python -I -S agent.pyz CONFIG`, or `python -I -S THIS_FILE CONFIG` without the
archive.

The package is loaded from this folder or archive under its own name, so the agent needs no
installed distribution.
"""

import os
import sys

if __name__ == "__main__":
    if sys.version_info < (
        3,
        8,
    ):  # a node may have an older Python: explain that instead of failing on newer syntax
        sys.exit(
            f"cavvy-agent: Python {sys.version.split()[0]} is too old; the agent needs 3.8 or newer"
        )
    package = type(sys)("cavvy_agent")
    package.__path__ = [
        os.path.dirname(os.path.abspath(__file__))
    ]  # marks this folder as a package
    sys.modules["cavvy_agent"] = package
    # the package exists from the line above on
    from cavvy_agent.main import main  # type: ignore[import-not-found]

    code = main(sys.argv[1:])
    sys.stderr.flush()
    # nothing is left to clean up, and Python's normal exit takes as long as a short job
    os._exit(code)
