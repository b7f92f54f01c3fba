"""What each scheduler needs to submit, query and end a job."""
