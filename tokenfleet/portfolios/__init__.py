"""Several models on one budget: which model gets which GPUs, when, and what each limit costs."""
