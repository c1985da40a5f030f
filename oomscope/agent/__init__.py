"""Inside the training process: torch and the standard library only; it never raises into the job."""
