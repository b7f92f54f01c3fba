"""How this process was started, and where it stands among the others."""
