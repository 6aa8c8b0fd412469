"""A framework's events in, calls of the monitoring session out; one file a callback."""
