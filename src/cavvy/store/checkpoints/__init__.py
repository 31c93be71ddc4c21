"""Files that jobs leave for their next attempts, in the state folder."""
