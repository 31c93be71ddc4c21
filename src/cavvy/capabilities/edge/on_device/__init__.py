"""The program of a device at the edge: it enrols, fetches signed models, serves them, and reports.
It runs with the standard library alone; only an update of a model loads other packages (`tuf`), and
does so in a process of its own. The package imports only the HTTP client of `agent`.
"""
