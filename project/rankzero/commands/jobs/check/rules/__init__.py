"""The rules of the check, one file per subject; each rule yields its findings in a script."""
