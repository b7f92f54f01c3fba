"""The order of samples: which one goes into which batch, on which rank."""
