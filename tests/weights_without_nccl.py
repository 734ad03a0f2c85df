"""vLLM's weight transfer over NCCL on a machine without a GPU: only the wire is another one.

Importing this replaces NCCL's communicator by a TCP store, and CUDA's streams by nothing, in the trainer and in a server
that is started as `python weights_without_nccl.py --model ...`. Handshake, routes, packing and loading are vLLM's own.
"""

import runpy
from types import SimpleNamespace

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer import nccl_common, packed_tensor

BROADCASTS = []  # bytes of each, in this process


class Wire:
    """What packed broadcasts ask of PyNcclCommunicator."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device=None):
        self.store, self.rank, self.world_size, self.count = None, rank, world_size, 0
        self.store = TCPStore(host, port, world_size, rank == 0, wait_for_workers=True)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.count += 1
        if self.rank == src:
            BROADCASTS.append(tensor.numel())
            self.store.set(f"{self.count}", tensor.numpy().tobytes())
            self.store.wait([f"{self.count}/{rank}" for rank in range(1, self.world_size)])
        else:
            tensor.copy_(torch.frombuffer(bytearray(self.store.get(f"{self.count}")), dtype=torch.uint8))
            self.store.set(f"{self.count}/{self.rank}", "")

    def destroy(self) -> None:
        self.store = None


nccl_common.stateless_init_process_group = Wire
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.synchronize = lambda: None
packed_tensor._get_streams = lambda device, count: [SimpleNamespace(synchronize=lambda: None)] * count

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
