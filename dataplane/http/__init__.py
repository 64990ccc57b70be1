"""HTTP rules shared by every API of ours: keys, body limits, errors, ports. Needs no fleet."""
