"""Order of samples: decides which sample goes into which batch on which rank."""
