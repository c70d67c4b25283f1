"""KV pools in a GPU's memory, as links see them: bytes copied to and from this machine's memory.

Owns one allocation of a device; the pool owns what lies where. Invariant: a copy that was returned is complete, and one
to the device is ordered before whatever the calling thread launches next.
"""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
import torch

from pdserve.errors import ConfigError


class DeviceMemory:
    address = 0  # not in this process's address space

    def __init__(self, num_bytes: int, device: str) -> None:
        """Raises ConfigError when the device has no room."""
        self._device = torch.device(device)
        try:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the KV pool of {num_bytes / 1e9:.2f} GB does not fit {device}: {reason}") from None
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def page_kind(self) -> str:
        return str(self._device)

    def read(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Blocks are published once their step is complete, so a stream of its own need not wait for the engine's."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            return self.tensor[offset : offset + num_bytes].to("cpu", copy=True).numpy()

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        source = torch.from_numpy(np.require(data, requirements=("C", "W", "O")))
        self.tensor[offset : offset + len(data)].copy_(source)

    def close(self) -> None:
        """The memory goes with its last view."""
