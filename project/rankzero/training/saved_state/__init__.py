"""Training state that no state dict of torch or Lightning holds, saved in every checkpoint."""
