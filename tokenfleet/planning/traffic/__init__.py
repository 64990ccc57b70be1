"""The traffic that there may be: draws of a trace, its drift, samples of a long one."""
