"""Figures and a self-contained report from a run's recorded telemetry; runs without torch."""
