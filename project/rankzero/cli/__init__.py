"""The command line: flags, config files and Rankzero's LightningCLI."""
