"""Drafters in the specforge package.

usage: compute.py (domino|eagle3 FOLDER)...

Reads FOLDER/given.safetensors and writes FOLDER/out.safetensors.

- Domino is loaded from FOLDER/specforge: logits, losses, gradients and drafts.
- Eagle3 is built by FOLDER/draft.json with random weights, and saved to FOLDER/specforge: logits of all steps, and drafts.

Needs TORCH_COMPILE_DISABLE=1: norms of Eagle3 would be compiled, which takes longer than all else.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.draft.domino import DominoDraftModel
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig


class AtAnchors(OnlineDominoModel):
    """Takes the given anchors instead of random ones."""

    anchors = None

    def _sample_anchor_positions(self, seq_len, loss_mask, device):
        return self.anchors.unsqueeze(0), torch.ones_like(self.anchors, dtype=torch.bool).unsqueeze(0)


def frozen(weight, make):
    layer = make(*weight.shape)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def domino(folder, given):
    draft, report = DominoDraftModel.from_pretrained(
        folder / "specforge", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    head = frozen(given["lm_head"], lambda rows, width: torch.nn.Linear(width, rows, bias=False))
    embed = frozen(given["embed"], torch.nn.Embedding)
    model = AtAnchors(
        draft,
        head,
        embed,
        mask_token_id=draft.mask_token_id,
        block_size=draft.block_size,
        attention_backend="eager",
        loss_decay_gamma=7.0,
        shift_label=draft.shift_label,
    )
    model.anchors = given["anchors"]
    ids, taps, mask = given["input_ids"], given["taps"], given["loss_mask"]
    out = {}
    for weight in given["lambdas"].tolist():
        model.zero_grad()
        loss, _, metrics = model(ids, taps, mask, lambda_base=weight)
        loss.backward()
        out[f"losses_{weight}"] = torch.stack([loss, metrics["final_loss"], metrics["base_loss"]])
        for name, parameter in draft.named_parameters():
            out[f"grad_{weight}.{name}"] = parameter.grad.clone()
    with torch.no_grad():
        _, _, hidden = model._forward_draft_blocks(ids, taps, mask)
        hidden = hidden.reshape(1, len(model.anchors), draft.block_size, -1)
        # The tokens at each slot's position, and after it.
        at = (model.anchors.unsqueeze(1) + torch.arange(draft.block_size + 1)).clamp(max=ids.shape[1] - 1)
        tokens = ids[0][at].unsqueeze(0)
        labels = tokens[:, :, 1:] if draft.shift_label else tokens[:, :, :-1]
        read = model._build_domino_head_inputs(ids, model.anchors.unsqueeze(0), labels, hidden)[1]
        out["logits"] = model._apply_domino_head(head(hidden), hidden, read, labels)[0]
        target = SimpleNamespace(lm_head=head, model=SimpleNamespace(embed_tokens=embed))
        drafts = []
        for block, anchor in enumerate(model.anchors.tolist()):
            slots = torch.full((1, draft.block_size), draft.mask_token_id)
            slots[0, 0] = ids[0, anchor]
            drafts.append(draft._sample_draft_tokens(target, hidden[:, block], slots)[0])
        out["drafts"] = torch.stack(drafts)
    return out


class WithLogits(OnlineEagle3Model):
    """Keeps the logits of each step. The losses run on GPUs alone."""

    def __init__(self, draft):
        super().__init__(draft)
        self.logits = []

    def _acc_and_loss(self, *, logits, **_):
        self.logits.append(logits[0])
        return [None] * 7


def random_eagle3(folder, given):
    draft = LlamaForCausalLMEagle3(LlamaConfig(**json.loads((folder / "draft.json").read_text())))
    kept = given["kept"]
    for parameter in draft.parameters():
        parameter.normal_(std=0.3).add_(parameter.dim() == 1)
    draft.embed_tokens.weight.copy_(given["embed"])
    draft.d2t.copy_(kept - torch.arange(len(kept)))
    draft.t2d.zero_()[kept] = True
    draft.save_pretrained(folder / "specforge")
    return draft


@torch.no_grad()
def eagle3(folder, given):
    draft = random_eagle3(folder, given)
    # Token t + 1 stands beside the states of token t.
    tokens, taps = given["input_ids"][:, 1:], given["taps"][:, :-1]
    length = tokens.shape[1]
    model = WithLogits(draft)
    unread = torch.zeros(1, length, draft.vocab_size), torch.ones(1, length, 1)
    model(tokens, None, *unread, taps)
    # Every position drafts behind its own tokens.
    states = draft.project_hidden_states(taps)
    mask = draft.prepare_decoder_attention_mask(torch.ones(1, length), states, 1, length, 0)
    cache, drafts = [[], []], []
    for _ in range(model.length):
        embeds = draft.embed_input_ids(tokens)
        states = draft.backbone(embeds, states, cache, mask, torch.arange(length).unsqueeze(0))
        ids = draft.compute_logits(states).argmax(-1)
        tokens = ids + draft.d2t[ids]
        drafts.append(tokens[0])
    return {"logits": torch.stack(model.logits), "drafts": torch.stack(drafts)}


torch.manual_seed(1)
for kind, folder in zip(sys.argv[1::2], map(Path, sys.argv[2::2]), strict=True):
    given = load_file(folder / "given.safetensors")
    out = {"domino": domino, "eagle3": eagle3}[kind](folder, given)
    save_file({name: tensor.detach().contiguous() for name, tensor in out.items()}, folder / "out.safetensors")
