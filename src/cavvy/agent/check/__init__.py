"""A look at the node before its work starts, where the task asks for one."""
