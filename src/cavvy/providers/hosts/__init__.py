"""What providers of single hosts share: reading what a machine has, its offers, the agents'
configurations, records.
"""
