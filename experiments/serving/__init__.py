"""What a live fleet and the plan service do under load, moves and faults."""
