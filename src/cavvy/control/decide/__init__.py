"""What the control plane decides: values in, values out. No I/O, no clock, no event loop, no store.

The reconcilers read rows, ask these functions, and write or execute what they return.
"""
