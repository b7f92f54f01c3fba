"""The processes of a run: how they were started, how they meet, agree, stop and fail together."""
