"""Training state that the state dicts of torch and Lightning omit, saved in every checkpoint."""
