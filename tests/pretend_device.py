"""A pretended GPU, for machines without one: it finds operations that mix devices.

    with pretend(rloo) as gpu:            # tensors stay in CPU memory, but some claim to be on cuda:0:
        x = torch.ones(3).to("cuda:0")    # those that are moved, and everything computed from them
        x + torch.ones(3)                 # AssertionError
    gpu.num_varlen_calls                  # calls of varlen attention, whose requirements are asserted

A claim is attached to a storage, so views and autograd keep it. A TorchDispatchMode sees every operator, also in
backward. It does not notice operators that CUDA lacks, values of indices, streams or memory. For several ranks:
torchrun ... tests/pretend_device.py rloo --total-steps 1"""

import contextlib
import importlib
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tag, Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
TRUE_DEVICE = torch._C.TensorBase.device.__get__
TRUE_TO, TRUE_TOLIST, TRUE_NUMPY, TRUE_TENSOR = Tensor.to, Tensor.tolist, Tensor.numpy, torch.tensor


def on_gpu(x: Tensor) -> bool:
    return getattr(x.untyped_storage(), "on_gpu", False)


def tensors_in(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and not x.is_meta]


def claim(results):
    for x in tensors_in(results):
        x.untyped_storage().on_gpu = True
    return results


class PretendedGpu(TorchDispatchMode):
    num_varlen_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        space, _, name = function._schema.name.partition("::")
        tensors = tensors_in((args, kwargs))
        cpu_tensors = [x for x in tensors if not on_gpu(x)]
        if kwargs.get("device") is not None and kwargs["device"].type == "cuda":  # a factory, or a copy
            return claim(function(*args, **kwargs | {"device": CPU}))
        is_collective = space == "c10d" and name != "barrier"
        assert not (is_collective and cpu_tensors), f"a CPU tensor in {name}, which NCCL refuses"
        if len(cpu_tensors) == len(tensors) or name == "copy_":
            return function(*args, **kwargs)
        indexes = "index" in name and isinstance(args[1], list | tuple)  # x[a, b], x[a, b] = y
        if indexes:  # indices may be on the CPU
            indices = [x for x in args[1] if x is not None]
            cpu_tensors = [x for x in cpu_tensors if not any(x is index for index in indices)]
        takes_scalars = Tag.pointwise in function.tags or indexes or "fill" in name  # including CPU scalars
        for x in cpu_tensors:
            is_allowed = x.dim() == 0 and takes_scalars and not (name.endswith("_") and x is args[0])
            assert is_allowed, f"{name} of cuda:0 and a CPU tensor {tuple(x.shape)}"
        return claim(function(*args, **kwargs))

    def varlen_attn(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
    ):  # fmt: skip
        """Run segment by segment, and assert what the kernel requires of its inputs."""
        for x in (query, key, value):
            assert on_gpu(x) and x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[-1] % 8 == 0
        bounds_q, bounds_k = TRUE_TOLIST(cu_seq_q), TRUE_TOLIST(cu_seq_k)
        for cu, bounds, longest, x in ((cu_seq_q, bounds_q, max_q, query), (cu_seq_k, bounds_k, max_k, key)):
            assert on_gpu(cu) and cu.dtype == torch.int32 and cu.is_contiguous() and type(longest) is int
            assert longest == max(b - a for a, b in pairwise(bounds)) and bounds[-1] == len(x)
        assert window_size == (-1, 0)  # causal, aligned at the bottom right
        self.num_varlen_calls += 1
        outputs = []
        for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k)):
            mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=GPU).tril((k1 - k0) - (q1 - q0))
            segment = [x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1])]
            attend = torch.nn.functional.scaled_dot_product_attention
            outputs.append(attend(*segment, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
        return torch.cat(outputs)


def to(x, *args, copy=False, **kwargs):
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or x.device, dtype or x.dtype
    if device.type == "cuda" and not on_gpu(x):
        return TRUE_TO(x, GPU, dtype, non_blocking)
    x = TRUE_TO(x, None if device.type == "cuda" else device, dtype, copy=copy)
    return on_cpu(x, Tensor.clone) if device == CPU and on_gpu(x) else x


def on_cpu(x, function):
    with _disable_current_modes():
        return function(x.detach())


def numpy(x, **kwargs):
    assert not on_gpu(x), "numpy() of cuda:0"
    return TRUE_NUMPY(x, **kwargs)


def tensor(data, device=None, **kwargs):  # created in C++, where no mode sees it
    return to(TRUE_TENSOR(data, **kwargs), device) if device else TRUE_TENSOR(data, **kwargs)


@contextlib.contextmanager
def pretend(script):
    """The module's runs in this process use the pretended GPU."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
    from torch.distributed import distributed_c10d
    from torch.utils import _device

    from common import attention

    gpu = PretendedGpu()
    _device._device_constructors()  # cached, so that `with torch.device(...)` uses the true torch.tensor
    patches = [
        (Tensor, "device", property(lambda x: GPU if on_gpu(x) else TRUE_DEVICE(x))),
        (Tensor, "is_cuda", property(on_gpu)),
        (Tensor, "to", to),
        (Tensor, "cpu", lambda x: to(x, CPU)),
        (Tensor, "numpy", numpy),
        (Tensor, "tolist", lambda x: on_cpu(x, TRUE_TOLIST)),
        (torch, "tensor", tensor),
        (attention, "varlen_attn", gpu.varlen_attn),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_rng_state", lambda device: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device: None),
        (distributed_c10d, "_get_object_coll_device", lambda group=None: "cuda:0"),
        (Accelerator, "device_name", lambda self, index=None: "cuda:0"),
        (Accelerator, "current_device_name", lambda self: "cuda:0"),
        (Accelerator, "FloatTensor", property(lambda self: lambda x: tensor(x, GPU, dtype=torch.float32))),
        (Accelerator, "ByteTensor", property(lambda self: lambda x: tensor(x, GPU, dtype=torch.uint8))),
    ]

    init = script.init_distributed

    def init_distributed() -> None:
        script.DEVICE = CPU  # gloo
        init()
        script.DEVICE = GPU

    with pytest.MonkeyPatch.context() as patch, gpu:
        for target, name, replacement in patches:
            patch.setattr(target, name, replacement)
        patch.setattr(script, "DEVICE", GPU)
        patch.setattr(script, "init_distributed", init_distributed)
        yield gpu


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import tyro

    module = importlib.import_module(sys.argv[1])
    with pretend(module):
        module.main(tyro.cli(module.Args, args=sys.argv[2:]))
