"""The request for a job: the command line, the site file, and what they result in."""
