"""The scheduler job in which a run takes place: its time limit and its requeue."""
