"""Tables of accelerators, regions and retired instance types, and the rules by which an offer fits
a requirement. The only I/O is reading the package's own tables.
"""
