"""What plans, what-if answers and placement policies achieve, and what they rest on."""
