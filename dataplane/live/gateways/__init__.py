"""Gateways in processes of their own, in front of one FleetCore: their wire, its two ends, their lives."""
