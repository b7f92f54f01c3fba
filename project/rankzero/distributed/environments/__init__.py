"""How this process was started: one file for each launcher."""
