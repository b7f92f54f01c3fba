"""What the files of a run tell about it. Does not import torch."""
