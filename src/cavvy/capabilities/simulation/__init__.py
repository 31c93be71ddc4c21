"""Simulations: the production policies and the autoscaler on recorded markets, queues and
requests.
"""
