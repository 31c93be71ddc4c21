"""The process beside the GPU: it claims, runs, reports, checkpoints and stops; standard library
only.
"""
