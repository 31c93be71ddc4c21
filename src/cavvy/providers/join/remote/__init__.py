"""What a joined machine runs: it calls the control plane and carries the lines of a supervisor,
which does the rest.

Nothing but the standard library, any Python from 3.8 on, Linux.
"""
