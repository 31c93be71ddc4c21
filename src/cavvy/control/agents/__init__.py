"""Where agents claim their work, report, and hear what is wanted of them."""
