"""The control plane's decisions as pure functions. The functions do no I/O and use no clock, event
loop or store.

The reconcilers read rows, call the functions of this package, and write or execute the results.
"""
