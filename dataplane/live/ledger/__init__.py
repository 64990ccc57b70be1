"""The ledger: what every worker holds, where a request goes, and the queue of those that wait."""
