"""What replays requests uses the gateway and the autoscaler of the capability `serving`."""

from importlib.util import find_spec

collect_ignore = (
    ["sim/test_serving.py", "sim/test_traces_serving.py", "sim/test_ways.py"]
    if find_spec("cavvy.capabilities.serving") is None
    else []
)
