"""Profile files: the library, measurements, fits, predictions, prices."""
