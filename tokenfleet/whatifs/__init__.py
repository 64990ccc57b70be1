"""What-if grids: axes, scenarios, how they are solved side by side, and what they cost."""
