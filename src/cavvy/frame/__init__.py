"""The frame that holds capabilities: what one contributes (`capability`), and where they are found
(`discover`, `entry_points`). It imports no other module.
"""
