"""Callbacks that turn a framework's events into calls of the monitoring session, one a file."""
