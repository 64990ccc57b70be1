"""HTTP rules that every API of Tokenfleet shares (keys, body limits, errors, ports); needs no fleet."""
