"""One kernel at a time, compared with its oracle and its peers."""
