"""Exports of a plan: Kubernetes objects, Helm values, rules, a dashboard, a systemd unit."""
