"""The self-test: plants faults into real engines, and checks that the comparison names them and
raises no alarm for a healthy pair."""
