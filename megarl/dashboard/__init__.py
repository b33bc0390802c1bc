"""What shows runs from their directories: status, comparison and the page. Training imports nothing of it."""
