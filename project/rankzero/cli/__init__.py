"""The command line: flags, config files and the LightningCLI that reads them."""
