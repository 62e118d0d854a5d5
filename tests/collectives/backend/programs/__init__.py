"""What the processes of a crew run: one module a subject, one function a check."""
