"""The process of a server: what it opens, listens to, keeps, saves and restores. Its HTTP API is in
`api`.
"""
