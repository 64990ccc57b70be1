"""The traffic that there may be: draws of a trace, samples of a long one."""
