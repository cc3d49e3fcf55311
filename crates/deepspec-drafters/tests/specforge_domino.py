"""Logits, losses, gradients and drafts of converted Domino drafters in the specforge package.

usage: specforge_domino.py (CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors)...
"""

import sys
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
from specforge.modeling.draft.domino import DominoDraftModel


class AtAnchors(OnlineDominoModel):
    """Takes the given anchors instead of random ones."""

    anchors = None

    def _sample_anchor_positions(self, seq_len, loss_mask, device):
        return self.anchors.unsqueeze(0), torch.ones_like(self.anchors, dtype=torch.bool).unsqueeze(0)


def frozen(weight, make):
    layer = make(*weight.shape)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def run(checkpoint, inputs, outputs):
    draft, report = DominoDraftModel.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    given = load_file(inputs)
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
    save_file({name: tensor.detach().contiguous() for name, tensor in out.items()}, outputs)


for at in range(1, len(sys.argv), 3):
    run(*sys.argv[at : at + 3])
