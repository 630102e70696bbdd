"""Frozen values shared by every part of the controller; no I/O, no clock, no protobuf."""
