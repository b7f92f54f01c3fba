"""What `self.log` gathers: averages over ranks, and values that a resumed run keeps."""
