"""Fixtures of several files here."""

from tests.checkpoint.s3_server import client, server

__all__ = ["client", "server"]
