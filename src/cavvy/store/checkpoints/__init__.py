"""What jobs leave behind for their next attempts, in the state folder."""
