"""The decisions, as functions of numbers: no clock, no I/O, no globals."""
