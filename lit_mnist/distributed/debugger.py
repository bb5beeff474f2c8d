"""`LIT_MNIST_DEBUG`: ranks wait for a debugger before they begin."""

from __future__ import annotations

import os
import socket

from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.errors import InputError

VARIABLE = "LIT_MNIST_DEBUG"
FIRST_PORT = 5678
# A rank that stops at a breakpoint for longer than `run.timeout` ends the run.
_SHORT = 3600.0


def wait_for_debugger(rank: Rank, timeout: float) -> None:
    """Waits until a debugger is attached, if `LIT_MNIST_DEBUG` names this rank: `all`, or numbers such as `0,1`.

    A rank listens on the loopback address only, on port 5678 plus its number.

    Args:
        rank: This rank.
        timeout: Seconds that the ranks wait for each other.

    Raises:
        InputError: The variable is not understood, debugpy is not installed, or the port is in use.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return
    numbers = wanted.replace(" ", "").split(",")
    if wanted != "all" and not all(number.isdecimal() and int(number) < rank.world_size for number in numbers):
        raise InputError(f"{VARIABLE} is {wanted!r}: use all, or the numbers of ranks below {rank.world_size}.")
    if wanted != "all" and str(rank.rank) not in [str(int(number)) for number in numbers]:
        return
    # The debugger's own warning about modules of the standard library, which nobody wants to debug here.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy
    except ImportError as error:
        raise InputError(f"{VARIABLE} needs debugpy: pip install debugpy.") from error
    port = FIRST_PORT + rank.rank
    try:
        # debugpy waits forever for a port that is in use.
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise InputError(f"Rank {rank.rank} cannot wait for a debugger on port {port}: {error.strerror}.") from error
    debugpy.listen(("127.0.0.1", port), in_process_debug_adapter=True)
    text = f"rank {rank.rank} waits for a debugger on 127.0.0.1:{port}"
    if timeout < _SHORT:
        text += f"; the other ranks wait {timeout:.0f} s for it (--run.timeout)"
    RANK_STATUS.warn(text)
    debugpy.wait_for_client()
