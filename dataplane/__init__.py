"""The simulated and the live data plane, and the HTTP rules and request history beside them."""
