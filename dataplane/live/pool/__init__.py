"""The workers of a fleet and the hosts they run on: launch, watch, drain, stop, relaunch."""
