"""How profiles are made, and how far measured and simulated times are apart."""
