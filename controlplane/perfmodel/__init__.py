"""The performance model of a worker: step times, KV memory, capacity, fits and their uncertainty."""
