"""Lets vLLM's hidden-states connector run on a machine without a GPU. It is used by tests only.

With this folder on PYTHONPATH, vLLM loads it in every process, by the entry points of the distribution beside it. The
connector copies states on a CUDA stream to page-locked memory. Without a GPU there is neither, and the copy is a plain
one.
"""

import contextlib


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
    """Replaces the name `torch` in the connector's module, where torch finds no GPU."""
    import torch

    if torch.cuda.is_available():
        return
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    class CpuTorch:
        cuda = NoCuda

        def __getattr__(self, name):
            return getattr(torch, name)

        def empty_like(self, *args, pin_memory=False, **kwargs):
            return torch.empty_like(*args, **kwargs)

    connector.torch = CpuTorch()
