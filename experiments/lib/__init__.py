"""What the experiments share: flags, results, resuming, workloads, baselines and served processes."""
