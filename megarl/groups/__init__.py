"""Groups of processes: trainers, engines, scoring processes, and the transfer of weights between them."""
