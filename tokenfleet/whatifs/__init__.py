"""The rooms of the what-if: what can vary, one scenario, many side by side, and what they say together."""
