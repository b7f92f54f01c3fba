"""Values logged by `self.log`: their averages over ranks, and their restoration in a resumed run."""
