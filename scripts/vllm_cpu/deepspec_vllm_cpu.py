"""Lets vLLM's build for CPUs return hidden states and run drafters on a machine without a GPU. It is used by tests only.

With this folder on PYTHONPATH, vLLM loads it in every process, by the entry points of the distribution beside it.

- The hidden-states connector copies states on a CUDA stream to page-locked memory. Here the copy is a plain one.
- Drafts in blocks and Gated DeltaNet need Triton, which compiles nothing for CPUs. With TRITON_INTERPRET=1 in the
  environment, its interpreter runs the kernels. Without that variable vLLM runs without Triton, as it comes.
- On a CPU, Gated DeltaNet takes bfloat16 only. In float32, vLLM's Triton kernel of the recurrence runs here.
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
        patch_gated_delta_net()


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


def patch_gated_delta_net():
    """Lets Gated DeltaNet run in float32, by vLLM's Triton kernel of the recurrence."""
    import inspect

    import torch
    import triton.language as tl
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent
    from vllm.utils.torch_utils import _resolve_layer_name

    core, ops = gdn_attention.cpu_gdn_attention_core, gdn_attention.ops
    # The interpreter replaces functions of `tl` during a launch; the module keeps the one of before.
    fused_recurrent.exp = lambda x: tl.exp(x)

    def gating(A_log, a, b, dt_bias):
        decay = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        return decay.unsqueeze(0), b.sigmoid().unsqueeze(0)

    def recurrence(tokens, states, starts, begin, end):
        """Outputs `[1, T, heads, V]` of sequences. One begins from the slot `begin(sequence)`, and the state after its
        token t goes to the slot `end(sequence, t)`, unless that is None."""
        outputs = []
        for sequence, (first, last) in enumerate(zip(starts, starts[1:])):
            # The kernel's states are transposed, and it gives those after each token.
            output, after = fused_recurrent.fused_recurrent_gated_delta_rule(
                *(of[:, first:last].contiguous() for of in tokens),
                initial_state=states[begin(sequence)].mT.unsqueeze(0).contiguous(),
                inplace_final_state=False,
                use_qk_l2norm_in_kernel=True,
            )
            for token, state in enumerate(after):
                slot = end(sequence, token if last - first - 1 > token else -1)
                if slot is not None:
                    states[slot] = state.mT
            outputs.append(output)
        return torch.cat(outputs, 1)

    class FloatOps:
        """The operators of vLLM, with float32 where it has C++ kernels for bfloat16."""

        def __getattr__(self, name):
            return getattr(ops, name)

        def fused_gdn_gating_cpu(self, **of):
            return (gating if of["a"].dtype == torch.float32 else ops.fused_gdn_gating_cpu)(**of)

        def chunk_gated_delta_rule_cpu(self, **of):
            if of["query"].dtype != torch.float32:
                return ops.chunk_gated_delta_rule_cpu(**of)
            tokens = [of[name] for name in ("query", "key", "value", "g", "beta")]
            states, slots = of["initial_state"], of["initial_state_indices"].tolist()
            last = lambda sequence, token: slots[sequence] if token == -1 else None
            return recurrence(tokens, states, of["cu_seqlens"].tolist(), slots.__getitem__, last), states

        def fused_sigmoid_gating_delta_rule_update_cpu(self, **of):
            if of["q"].dtype != torch.float32:
                return ops.fused_sigmoid_gating_delta_rule_update_cpu(**of)
            tokens = of["q"], of["k"], of["v"], *gating(of["A_log"], of["a"], of["b"], of["dt_bias"])
            states, slots = of["initial_state_source"], of["initial_state_indices"].tolist()
            own = lambda sequence, token: slots[sequence]
            starts = range(len(slots) + 1)
            return recurrence(tokens, states, starts, slots.__getitem__, own).transpose(0, 1)

        def fused_sigmoid_gating_delta_rule_update_spec_cpu(self, **of):
            if of["q"].dtype != torch.float32:
                return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(**of)
            of["q"], of["k"], of["v"] = (of[name].unsqueeze(0) for name in "qkv")
            tokens = of["q"], of["k"], of["v"], *gating(of["A_log"], of["a"], of["b"], of["dt_bias"])
            states, slots = of["initial_state_source"], of["spec_state_indices"].tolist()
            starts, accepted = of["cu_seqlens"].tolist(), of["num_accepted_tokens"].tolist()
            counts = [last - first for first, last in zip(starts, starts[1:])]
            begin = lambda sequence: slots[sequence][accepted[sequence] - 1]
            own = lambda sequence, token: slots[sequence][token % counts[sequence]]
            return recurrence(tokens, states, starts, begin, own).squeeze(0)

    def core_in_any_dtype(mixed_qkv, b, a, core_attn_out, layer_name):
        if mixed_qkv.dtype != torch.float32:
            return core(mixed_qkv, b, a, core_attn_out, layer_name)
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        metadata = context.attn_metadata and context.attn_metadata[layer.prefix]
        if not metadata or metadata.num_actual_tokens == 0:
            return
        arguments = layer, metadata, mixed_qkv, b, a, core_attn_out
        width, kept = layer.conv1d.weight.size(-1), gdn_attention._conv_buffer_view(layer).size(-1)
        if kept == width - 1:
            gdn_attention._cpu_gdn_attention_nonspec(*arguments)
        else:
            gdn_attention._cpu_gdn_attention_spec_aware(*arguments, width, kept)

    # vLLM derives the operator's schema from the types of its arguments.
    core_in_any_dtype.__signature__ = inspect.signature(core, eval_str=True)
    gdn_attention.ops, gdn_attention.cpu_gdn_attention_core = FloatOps(), core_in_any_dtype
    # Its C++ convolution takes bfloat16 only, and packs the weights for it. In bfloat16 PyTorch's operators run, too.
    torch.cpu._is_avx512_bf16_supported = lambda: False


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
