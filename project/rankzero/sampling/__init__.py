"""The order of samples: which sample goes into which batch, on which rank."""
