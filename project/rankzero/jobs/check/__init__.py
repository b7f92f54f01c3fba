"""The check of a user's own job script: what is wrong in it, and what to write instead."""
