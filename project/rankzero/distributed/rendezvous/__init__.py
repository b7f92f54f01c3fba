"""How the processes find one another before torch is imported."""
