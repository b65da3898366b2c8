"""Compiled steps, sampling and generation: token ids in, token ids out."""
