"""The capabilities that come with Cavvy, a folder each. A folder can be taken out: nothing outside
of it imports it, and its `capability.py` says what it contributes. They stand on the modules of the
core, and on no other capability unless they declare it.
"""
