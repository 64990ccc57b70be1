"""The simulated and the live data plane, with the HTTP rules and the request history."""
