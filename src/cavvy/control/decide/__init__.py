"""The control plane's decisions as pure functions. The functions do no I/O and use no clock, event
loop or store.

The reconcilers read rows, call these functions, and write or execute the results.
"""
