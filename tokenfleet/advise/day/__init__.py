"""The last day of an advice: kept, summed up, and shown as a page."""
