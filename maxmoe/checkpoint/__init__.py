"""Checkpoints on disk: reading, converting and writing weights. Nothing here runs the model."""
