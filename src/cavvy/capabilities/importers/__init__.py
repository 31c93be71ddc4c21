"""Task files of other tools, scripts, notebooks and Makefiles. The core asks `reader.READER`, which
loads the rest of the folder only for such a file.
"""
