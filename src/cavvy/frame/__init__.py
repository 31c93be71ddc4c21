"""The frame that holds capabilities: what one contributes (`capability`), and where they are found
(`discover`, `entry_points`), and what of them has failed (`faults`). It imports no other module.
"""
