"""Watches attention while a model trains: sites, measuring, detectors, policy and the session."""
