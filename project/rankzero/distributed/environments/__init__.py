"""Launcher detection: how this process was started; `launchers/` has one module per launcher."""
