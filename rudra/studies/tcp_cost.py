"""Measurement of the core's time that TCP needs for a byte."""

import socket
import threading
import time

SENT_BYTES, PIECE_BYTES = 1 << 27, 1 << 16
"""Bytes that are sent, more than a cache holds, and bytes of each call."""


def cpu_s_per_byte() -> float:
    """Returns the core's time to send or to receive a byte by TCP, in seconds, as the mean of both ends.

    Both ends are in this process. They measure the time of their threads, so other users of the machine hardly matter.
    """
    sent, received = (memoryview(bytearray(b"\1") * SENT_BYTES) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[float] = []
        sender = threading.Thread(target=_send, args=(listener.getsockname(), sent, taken))
        sender.start()
        with listener.accept()[0] as connection:
            began, place = time.thread_time(), 0
            while place < SENT_BYTES and (count := connection.recv_into(received[place : place + PIECE_BYTES])):
                place += count
            received_s = time.thread_time() - began
        sender.join()
    return (sum(taken) + received_s) / (2 * SENT_BYTES)


def _send(address: tuple[str, int], sent: memoryview, taken: list[float]) -> None:
    with socket.create_connection(address) as connection:
        began = time.thread_time()
        for place in range(0, SENT_BYTES, PIECE_BYTES):
            connection.sendall(sent[place : place + PIECE_BYTES])
        taken.append(time.thread_time() - began)
