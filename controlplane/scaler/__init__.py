"""How much, and when? The cheapest mix of workers, and when to change it."""
