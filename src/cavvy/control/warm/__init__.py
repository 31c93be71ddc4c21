"""Gangs kept after their work for the next job of the same project: when, for which job, and who
pays.
"""
