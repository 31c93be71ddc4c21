"""Runs a function of an app once, without arguments: the program of a run of its schedule.

`python3 once.py APP.json NAME`. It imports only the standard library, files that do, and the app's
own code.
"""

import inspect
import json
import os
import sys

if __name__ == "__main__":  # the root of the files that were sent with the working folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from cavvy.capabilities.functions.app import find_app
from cavvy.capabilities.functions.on_node.worker import explain_load, load_app, run_coroutine


def main() -> None:
    """Run the function of the arguments. An exception of the function is raised."""
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    name = sys.argv[2]
    try:
        load_app(spec, name)
    except Exception as error:  # noqa: BLE001 - the code raises anything
        sys.exit(f"the app {spec['app']} cannot be loaded: {explain_load(error)}")
    app = find_app(spec["app"])
    assert app is not None
    try:
        result = app.functions[name].local()
        if inspect.iscoroutine(result):
            result = run_coroutine(result)
        if inspect.isgenerator(result):
            for _ in result:
                pass
    finally:
        for each in app.classes.values():
            each.leave()


if __name__ == "__main__":
    main()
