"""Starts the supervisor (`python -I -S supervisor.pyz serve ROOT`), or prints the host's facts
(`facts ROOT`) or the named volumes of a project with their sizes (`volumes ROOT PROJECT`).

The package is loaded under its own name from the archive that contains this file.
"""

import json
import os
import sys

if __name__ == "__main__":
    package = type(sys)("cavvy_supervisor")
    package.__path__ = [
        os.path.dirname(os.path.abspath(__file__))
    ]  # marks this folder as a package
    sys.modules["cavvy_supervisor"] = package
    # the package exists from the line above on
    from cavvy_supervisor.facts import read_facts  # type: ignore[import-not-found]
    from cavvy_supervisor.mig_mode import divide_marked  # type: ignore[import-not-found]
    from cavvy_supervisor.service import HostSupervisor  # type: ignore[import-not-found]
    from cavvy_supervisor.volumes import count_volumes  # type: ignore[import-not-found]

    if sys.argv[1] == "facts":
        sys.stdout.write(json.dumps(read_facts(sys.argv[2], divide_marked(sys.argv[2]))))
        sys.stdout.flush()
    elif sys.argv[1] == "volumes":
        sys.stdout.write(json.dumps(count_volumes(sys.argv[2], sys.argv[3])))
        sys.stdout.flush()
    else:
        HostSupervisor(sys.argv[2]).serve()
    os._exit(0)  # nothing is left to clean up
