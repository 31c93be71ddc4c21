"""Makes work profiles for `cavvy estimate` and `cavvy plan`. The tracer runs one training step on
fake tensors, so no GPU is needed, and records every operation as a GPU would run it.

`script.py` runs a user's unchanged script on the device of `fake_device.py`, and `trace.py` records
and summarizes the step. The module `operations.py` determines the kinds, FLOPs and bytes of
operations, and `values.py` and `sizes.py` supply assumed values and sizes where a fake tensor has
no data.
"""
