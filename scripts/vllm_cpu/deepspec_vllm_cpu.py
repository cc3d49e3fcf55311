"""Lets vLLM's build for CPUs return hidden states and run drafters on a machine without a GPU. It is used by tests only.

With this folder on PYTHONPATH, vLLM loads it in every process, by the entry points of the distribution beside it.

- The hidden-states connector copies states on a CUDA stream to page-locked memory. Here the copy is a plain one.
- Drafts in blocks and Gated DeltaNet need Triton, which compiles nothing for CPUs. With TRITON_INTERPRET=1 in the
  environment, its interpreter runs the kernels. Without that variable vLLM runs without Triton, as it comes.
"""

import contextlib
import os


def patch():
    """Patches vLLM 0.32. vLLM calls this in every process before it reads a model."""
    import torch

    if torch.cuda.is_available():
        return
    patch_connector()
    if interpreting():
        patch_drafters()


def interpreting():
    """Whether the environment asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class NoStream:
    """Stands for a CUDA stream and for a CUDA event: all work is done when a call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: True


class NoCuda:
    """Stands for the module torch.cuda."""

    Stream = Event = NoStream

    @staticmethod
    def stream(stream):
        return contextlib.nullcontext()


def patch_connector():
    """Replaces the name `torch` in the connector's module."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    class CpuTorch:
        cuda = NoCuda

        def __getattr__(self, name):
            return getattr(torch, name)

        def empty_like(self, *args, pin_memory=False, **kwargs):
            return torch.empty_like(*args, **kwargs)

    connector.torch = CpuTorch()


def patch_drafters():
    """Mends what drafts in blocks get wrong, or lack, on CPUs."""
    import torch
    import triton.language as tl
    import triton.language.extra.libdevice as libdevice
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    # Its kernel norms the keys of all draft layers by the first one's weights.
    def each_by_its_own(model, keys):
        normed = torch.empty_like(keys)
        for layer, weights in enumerate(model._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weights, model._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = each_by_its_own
    # The interpreter has none of the device's own functions.
    libdevice.log1p = lambda x: tl.log(x + 1.0)


def offer_interpreter():
    """Registers Triton's interpreter as the backend `cpu`, where the environment asks for it.

    vLLM calls this as a platform plugin, which is before it looks for Triton's backends. It takes any backend called
    `cpu` for a working one, so an inactive one of Triton's own entry points would change servers without Triton. The
    result None says that this is no platform.
    """
    if not interpreting():
        return None
    import torch
    import triton.backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class Compiler(BaseBackend):
        supports_target = staticmethod(lambda target: target.backend == "cpu")
        hash = lambda self: "interpreted"
        parse_options = lambda self, options: options
        load_dialects = lambda self, context: None
        get_module_map = lambda self: {}

        def add_stages(self, stages, options):
            raise NotImplementedError("kernels are interpreted, not compiled")

    class Driver(DriverBase):
        is_active = classmethod(lambda cls: not torch.cuda.is_available())
        map_python_to_cpp_type = lambda self, kind: kind
        get_current_target = lambda self: GPUTarget("cpu", 0, 1)
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device=0: 0
        get_active_torch_device = lambda self: torch.device("cpu")
        get_device_interface = lambda self: torch.cpu

        def get_benchmarker(self):
            from triton.testing import do_bench

            return do_bench

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=Compiler, driver=Driver)
    return None
