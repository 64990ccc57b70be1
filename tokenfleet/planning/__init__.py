"""The rooms of the planner: what is asked, what is tried, how sure an answer is, and why it is so."""
