"""Programs that are copied to a Ray cluster and run there. These programs import nothing from
Cavvy.
"""
