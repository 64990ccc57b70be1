"""The control API, the controller process that runs `tick`, and the fleet that puts all parts together."""
