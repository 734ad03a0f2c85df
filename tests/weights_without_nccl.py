"""vLLM's weight transfer over NCCL where there is no GPU: only the wire is another one.

NCCL's communicator becomes a TCP store, and CUDA's streams nothing. Handshake, routes, packing and loading are vLLM's own.

    python tests/weights_without_nccl.py vllm.entrypoints.openai.api_server --model ...
    python tests/weights_without_nccl.py ppo_vl --vllm-weight-transfer nccl ...
"""

import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import TCPStore

sent = []  # bytes of each broadcast from this process


class Wire:
    """What packed broadcasts ask of PyNcclCommunicator."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: int):
        self.store, self.rank, self.count = TCPStore(host, port, world_size, rank == 0), rank, 0

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.count += 1
        if self.rank == src:
            sent.append(tensor.numel())
            self.store.set(f"{self.count}", tensor.numpy().tobytes())
            self.store.wait([f"{self.count} received"])
        else:
            tensor.copy_(torch.frombuffer(bytearray(self.store.get(f"{self.count}")), dtype=torch.uint8))
            self.store.set(f"{self.count} received", "")

    def destroy(self) -> None:
        self.store = None


def replace_nccl(setattr=setattr) -> None:
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    setattr(nccl_common, "stateless_init_process_group", Wire)
    setattr(packed_tensor, "_get_streams", lambda device, count: [SimpleNamespace(synchronize=lambda: None)] * count)
    setattr(torch.accelerator, "current_device_index", lambda: 0)
    setattr(torch.accelerator, "synchronize", lambda: None)


if __name__ in ("__main__", "__mp_main__"):  # and in the processes of a server
    replace_nccl()
if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name.startswith("vllm"):
        runpy.run_module(name, run_name="__main__")
    else:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        script = importlib.import_module(name)
        script.check_sampler_args = lambda args, world_size: None  # it asks for a GPU
        script.BUCKET = 2**20
        script.main(script.parse_args(sys.argv[1:]))
