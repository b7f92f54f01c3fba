"""The processes of a run: how they start, find one another, exchange objects, stop and fail together."""
