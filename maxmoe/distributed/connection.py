"""Messages between processes over TCP: JSON objects, one a line."""

import json
import socket
import threading

from absl import logging

SEND_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 2**20


class Connection:
    """One open connection with another process.

    Attributes:
      process_id: The other process's; -1 until it has said who it is.
      title: The other process in messages.
      is_excused: It has said that it leaves, or why it failed.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.process_id = -1
        self.title = "a process that did not say who it is"
        self.is_excused = False
        self._received = b""
        self._sending = threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # or a router may forget a silent connection
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)

    def send(self, **message: object) -> None:
        """Sends one message. Raises: OSError if the other side is gone or does not take it."""
        with self._sending:
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def send_if_there(self, **message: object) -> None:
        """Sends one message; that the other side is gone is noticed where its messages are read."""
        try:
            self.send(**message)
        except OSError as error:
            logging.vlog(1, "%s: %s", self.title, error)

    def receive(self) -> list[dict]:
        """Waits for data; returns the messages that it completes.

        Raises: OSError at the connection's end, ValueError for what is no message.
        """
        data = self.sock.recv(2**16)
        if not data:
            raise ConnectionError("the connection was closed")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MAX_MESSAGE_BYTES:
            raise ValueError("a message is too long")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not an object")
        return messages


def listen(port: int) -> socket.socket:
    """Listens on all addresses, as JAX's coordination service does. Raises: OSError if the port is taken."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise OSError(f"process 0 cannot listen on port {port}: {error}; give another --coordinator") from error
