"""Flax linen modules: they own the weights and wire the ops."""
