"""The control plane's decisions: values in, values out. No I/O, no clock, no event loop, no store.

The reconcilers read rows, call these functions, and write or execute the results.
"""
