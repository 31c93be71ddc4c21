"""Tables of accelerators, regions and retired instance types, and the rules by which an offer fits
a requirement. The package reads its own tables but does no other I/O.
"""
