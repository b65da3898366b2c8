"""Reinforcement learning over many domains at once, on the model's own forward pass and through its own engine."""
