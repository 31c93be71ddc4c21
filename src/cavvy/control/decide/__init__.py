"""The control plane's decisions as pure functions. They use no I/O, clock, event loop or store.

The reconcilers read rows, call these functions, and write or execute the results.
"""
