"""Other machines: trackers are switched to their offline mode, uploads are refused, and connections are reported."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_doctor.after_import import after_import

# Trackers then write to a local folder.
_OFFLINE = {
    "WANDB_MODE": "offline",
    "COMET_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}
_OFF = {"disabled", "dryrun", "debug"}
_LOCAL = ("127.", "::1", "localhost", "0.0.0.0")  # noqa: S104
_UPLOADS = ("create_", "upload_", "delete_", "update_", "move_", "preupload_")


def offline_environment(folder: Path) -> dict[str, str]:
    """Returns the variables that keep trackers from writing to a server, unless the user has them off.

    Args:
        folder: Folder for what MLflow would send to its server.
    """
    found = {name: value for name, value in _OFFLINE.items() if os.environ.get(name, "").lower() not in _OFF}
    address = os.environ.get("MLFLOW_TRACKING_URI", "")
    if address == "databricks" or ("://" in address and not address.startswith(("file:", "sqlite:"))):
        found["MLFLOW_TRACKING_URI"] = (folder / "mlflow").as_uri()
    return found


def watch(tell: Callable[[str], Any]) -> None:
    """Calls `tell` with the address of each other machine that Python connects to, and refuses uploads to the Hub."""
    asked = threading.local()

    def on_event(event: str, args: Any) -> None:
        if event == "socket.getaddrinfo":
            asked.host = args[0]
        elif event == "socket.connect" and isinstance(args[1], tuple) and args[0].type == socket.SOCK_STREAM:
            host, port = args[1][:2]
            if isinstance(host, str) and not host.startswith(_LOCAL):
                tell(f"{getattr(asked, 'host', None) or host}:{port}")
                # The next connection may name an address.
                asked.host = None

    sys.addaudithook(on_event)
    after_import({"huggingface_hub.hf_api": _refuse_uploads})


def _refuse_uploads(module: Any) -> None:
    for name, value in list(vars(module.HfApi).items()):
        if name.startswith(_UPLOADS) and callable(value):
            setattr(module.HfApi, name, _refused)


def _refused(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("The doctor uploads nothing to the Hugging Face Hub: examine the training without push_to_hub.")
