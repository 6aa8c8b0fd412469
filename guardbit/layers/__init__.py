"""Every layer of a model: where a step first goes wrong."""
