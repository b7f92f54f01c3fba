"""Jobs: the script that runs `fit` on a cluster, its submission, and its state. Does not import torch."""
