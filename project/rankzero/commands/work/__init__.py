"""What each command does after torch is imported."""
