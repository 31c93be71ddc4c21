"""What makes a training script slow, in dollars, and what helps: measured in the script itself,
in windows of steps.
"""
