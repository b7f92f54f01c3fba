"""What a person sees of a run: progress, measurements, figures."""
