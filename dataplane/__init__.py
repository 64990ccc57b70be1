"""Where requests run: simulated engines or real ones, behind one port."""
