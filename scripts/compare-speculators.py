#!/usr/bin/env python3
"""Compares training steps here and in the trainer of speculators 0.9, drafter by drafter: processor time and memory.

    scripts/compare-speculators.py [KIND]...                by default all kinds that both train, as in configs/tiny
    scripts/compare-speculators.py --steps 5 20 domino      a kind that speculators lacks is measured here alone
    scripts/compare-speculators.py --steps 20 60            both lengths of training
    scripts/compare-speculators.py --shape medium dspark    hidden 512, a vocabulary of 32,768, 4 samples of 512 tokens
    scripts/compare-speculators.py --json FILE              also writes every single measurement

Prints the tables of docs/measurements.md, without the columns that say where and when. Needs a build and a Python with
scripts/requirements-speculators.txt, which DEEPSPEC_SPECULATORS_PYTHON names (default: .venv-speculators/bin/python).

Both sides train drafters of equal sizes on random states, in float32 on one thread, with AdamW and clipped gradients.
The script stops if the numbers of trained weights differ.

- Here that is `deepspec-train --bench` with the recipe in configs/tiny.
- There it is speculators' own `Trainer.train_epoch`, with its models, losses, optimiser, schedule and collation.
- JetSpec is DFlash with causal blocks. There its layers have a sliding window, which is longer than the text.
- eagle3_512 and peagle_512 can draft 512 of the target's tokens. Both sides read the same `d2t` and `t2d`.
- Nothing is compiled, since its trainer compiles on GPUs only.
- Its attention is `sdpa` and its losses are `eager`: FlexAttention's gradients and the fused losses need a GPU.
- The device of its trainer, the synchronisation of its timer and its progress bar are replaced.

Time is user and system time of a step, from two lengths of training, so that start and end cancel out. Here these are
two runs; there one run is asked in between. Memory is the peak of resident memory of the longer run. It is also given
above the loaded state: program, model and data before the first step. Gradients, moments and code that the steps read
count. Both sides take turns, each time in new processes.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "dspark": "DSpark",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "xpress": "xPress",
    "eagle3": "Eagle3",
    "peagle": "P-EAGLE",
    "mtp": "MTP-1",
    "jetspec": "JetSpec",
    "eagle3_512": "Eagle3 with 512 tokens",
    "peagle_512": "P-EAGLE with 512 tokens",
}
# Kinds that speculators lacks.
ONLY_HERE = {
    "domino": "Domino",
    "xpress_dflash2": "xPress on DFlash 2",
    "dspark_v4": "DSpark of DeepSeek-V4, experts of width 40",
    "dspark_sinks": "DSpark with attention sinks",
    "gemma4_assistant": "Gemma 4 assistant",
}
# Recipes in configs/tiny that have other names than their kinds. The assistant takes samples and optimiser from MTP-1.
RECIPES = {"eagle3_512": "eagle3", "peagle_512": "peagle", "gemma4_assistant": "mtp"}
DRAFT_TOKENS = 512
# Target, tokens of a sample, and steps of both lengths.
SHAPES = {
    "tiny": ({}, 128, (20, 60)),
    "medium": (
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 32768,
        },
        512,
        (1, 4),
    ),
}


def recipe_of(kind):
    return ROOT / "configs" / "tiny" / f"{RECIPES.get(kind, kind)}.yaml"


def changes(kind, shape):
    """Changes of a kind to its recipe."""
    if kind in ("eagle3_512", "peagle_512"):
        return [f"drafter.{RECIPES[kind]}.draft_vocab={shape['target']}/draft_vocab.safetensors"]
    if kind == "dspark_v4":
        return ["drafter.dspark_v4.stage_config.moe_intermediate_size=40"]
    if kind != "gemma4_assistant":
        return []
    # Half as wide as its target, with as many heads and MLPs of equal width. It reads the states that enter the target's last
    # two layers, one of each attention type.
    of = json.loads((Path(shape["target"]) / "gemma4" / "config.json").read_text())["text_config"]
    sizes = {key: of[key] for key in ("intermediate_size", "num_attention_heads")} | {"hidden_size": of["hidden_size"] // 2}
    target = {"model": f"{shape['target']}/gemma4", "layer_ids": [of["num_hidden_layers"] - below for below in (3, 2)]}
    return [f"target={json.dumps(target)}", f"drafter={json.dumps({kind: sizes})}"]


def here(kind, shape, lengths):
    """Seconds of a step, loaded and peak bytes and trained weights of `deepspec-train --bench`."""
    settings = [f"target.model={shape['target']}", f"data.max_length={shape['tokens']}", *changes(kind, shape)]
    command = [ROOT / "target" / "release" / "deepspec-train", "--quiet", "--device", "cpu", "--json"]
    command += ["--config", recipe_of(kind), *(each for setting in settings for each in ("--set", setting))]
    (few, _), (more, found) = (timed([*command, "--bench", str(steps)]) for steps in lengths)
    memory = (found[f"host_memory_{key}_bytes"] for key in ("loaded", "peak"))
    return (more - few) / (lengths[1] - lengths[0]), *memory, found["trainable_weights"]


def there(kind, shape, lengths):
    """The same of speculators' trainer."""
    python = os.environ.get("DEEPSPEC_SPECULATORS_PYTHON", ROOT / ".venv-speculators" / "bin" / "python")
    command = [python, __file__, kind, "--train", "--steps", *map(str, lengths), "--shape", json.dumps(shape)]
    _, found = timed(command)
    return found["seconds"], found["loaded"], found["peak"], found["weights"]


def timed(command):
    """Runs a program to its end and gives its processor time and the JSON that it prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([str(each) for each in command], cwd=ROOT, env=env, stdout=output, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if child.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))}\n{errors.read()}")
        return usage.ru_utime + usage.ru_stime, json.loads(output.read())


def measure(kind, shape, lengths, repeats):
    """Seconds of a step, peak bytes above the loaded state and peak bytes, of each side and repetition, and weights."""
    sides = {"here": here} if kind in ONLY_HERE else {"here": here, "there": there}
    found = {side: {"seconds": [], "above": [], "peak": []} for side in sides}
    weights = {}
    for number in range(repeats):
        for side, run in sides.items():
            seconds, loaded, peak, weights[side] = run(kind, shape, lengths)
            found[side]["seconds"].append(seconds)
            found[side]["above"].append(peak - loaded)
            found[side]["peak"].append(peak)
            print(f"{kind}, {side}, {number + 1} of {repeats}", file=sys.stderr, flush=True)
    if weights["here"] != weights.get("there", weights["here"]):
        raise SystemExit(f"{kind}: {weights['here']} weights are trained here and {weights['there']} there")
    return found | {"weights": weights["here"]}


def tables(found):
    """Rows for docs/measurements.md, without the columns that say where and when."""
    both = {kind: of for kind, of in found.items() if kind in KINDS}
    lines = heading("measured") if both else []
    for kind, of in both.items():
        cells = (spread(of[side]["seconds"], 1e3, 0) for side in ("here", "there"))
        lines.append(f"| {KINDS[kind]}, {of['weights'] / 1e6:.2f} M weights | {'; '.join(cells)}; {ratio(of, 'seconds')} |")
    lines += heading("measured") if both else []
    for kind, of in both.items():
        cells = (spread(of[side]["above"], 1e-6, 0) for side in ("here", "there"))
        peaks = ", ".join(peak_of(of[side]) for side in ("here", "there"))
        lines.append(f"| {KINDS[kind]} | {'; '.join(cells)}; {ratio(of, 'above')}; peaks {peaks} |")
    alone = {kind: of for kind, of in found.items() if kind in ONLY_HERE}
    lines += heading("drafter") if alone else []
    for kind, of in alone.items():
        own = of["here"]
        cells = (spread(own["seconds"], 1e3, 0), spread(own["above"], 1e-6, 0), peak_of(own))
        lines.append(f"| {ONLY_HERE[kind]}, {of['weights'] / 1e6:.2f} M weights | {'; '.join(cells)} |")
    return lines


def heading(first):
    return ["", f"| {first} | figure |", "|---|---|"]


def peak_of(own):
    """Median of the peaks in MB."""
    return f"{statistics.median(own['peak']) / 1e6:,.0f}"


def spread(values, scale, digits):
    """Median and range."""
    median, least, most = (f"{scale * each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} … {most})"


def ratio(of, key):
    return f"{statistics.median(of['here'][key]) / statistics.median(of['there'][key]):.2f}"


def train(kind, shape, lengths):
    """Trains in speculators, in this process."""
    import logging
    import warnings

    import torch
    import yaml
    from safetensors.torch import load_file
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.mtp.data import shift_batch_mtp
    from speculators.train import trainer
    from speculators.train.data import BaseDataset, CollateFn

    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    recipe = yaml.safe_load(recipe_of(kind).read_text())
    target = json.loads((ROOT / shape["target"] / "config.json").read_text())
    samples, tokens = recipe["train"]["local_batch_size"], shape["tokens"]
    taps = len(recipe["target"].get("layer_ids", ()))
    vocab = load_file(Path(shape["target"]) / "draft_vocab.safetensors") if kind.endswith("_512") else None
    (kind,) = recipe["drafter"]
    model, options = build(kind, recipe, target, vocab)

    class Conversations(BaseDataset):
        """Random states in bfloat16, all tokens but the first quarter supervised, as `deepspec-train --bench` draws them."""

        def _compute_approx_lengths(self):
            return [tokens] * samples * 3

        def _get_raw_data(self, index):
            return self.rows[index]

        def __len__(self):
            return len(self.rows)

    def states(width):
        return torch.randn(tokens, width * target["hidden_size"], dtype=torch.bfloat16)

    data = Conversations(tokens)
    data.rows = [
        {
            "hidden_states": states(taps),
            "input_ids": torch.randint(target["vocab_size"], (tokens,)),
            "verifier_last_hidden_states": states(1),
            "loss_mask": torch.arange(tokens) >= tokens // 4,
        }
        for _ in data.approx_lengths
    ]
    # Preparing a sample for Eagle3 and P-EAGLE leaves out a token.
    prepare = {"eagle3": shift_batch, "peagle": shift_batch, "mtp": shift_batch_mtp}.get(kind)
    length = samples * (tokens - 1 if prepare is shift_batch else tokens)
    collate = CollateFn(length, target["hidden_size"], taps, torch.float32, prepare)
    batches = [range(first % len(data), first % len(data) + samples) for first in range(0, lengths[1] * samples, samples)]
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, collate_fn=collate)

    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    trainer.tqdm = lambda loader, **_: loader
    with tempfile.TemporaryDirectory() as folder:
        config = trainer.TrainerConfig(
            lr=float(recipe["train"]["lr"]),
            num_epochs=1,
            save_path=folder,
            train_call_kwargs=model.get_trainer_kwargs(**options)[0],
            weight_decay=recipe["train"]["weight_decay"],
            scheduler_warmup_ratio=recipe["train"]["warmup_ratio"],
            hidden_states_dtype=torch.float32,
            log_freq=recipe["logging"]["logging_steps"],
            max_steps=lengths[1],
        )
        run = trainer.Trainer(model, config, loader)
        # 5 resets the peak resident size; see proc_pid_clear_refs(5).
        Path("/proc/self/clear_refs").write_text("5")
        loaded = resident("VmRSS")
        times = []
        run.train_epoch(0, step_callback=lambda: times.append(sum(os.times()[:2])))
    weights = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert all(each.isfinite().all() for each in model.parameters())
    few, more = lengths
    seconds = (times[more - 1] - times[few - 1]) / (more - few)
    print(json.dumps({"seconds": seconds, "loaded": loaded, "peak": resident("VmHWM"), "weights": weights}))


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10


def build(kind, recipe, target, vocab):
    """The drafter of a recipe in speculators with random weights, and what its training options are.

    `vocab` holds `t2d` and `d2t` of a reduced vocabulary, or is None.
    """
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    of = recipe["drafter"][kind]
    layers = of.get("num_draft_layers", 1)
    sizes = {key: value for key, value in target.items() if key not in ("layer_types", "model_type")}
    decoder = Qwen3Config(**{**sizes, "num_hidden_layers": layers, "tie_word_embeddings": False})
    decoder._attn_implementation = "sdpa"
    if of.get("causal"):
        # Within a block, a layer with a window sees only the slots up to its own. The context is not cut.
        decoder.layer_types = ["sliding_attention"] * layers
        decoder.sliding_window = target["max_position_embeddings"]
    loss = of.get("loss", {})
    options = {"loss_implementation": "eager", "loss_fn": "kl_div", "per_position_loss_weight": "fixed-exp-decay"}
    # Total variation is half of the L1 distance.
    terms = {"ce": loss.get("ce_alpha", 0.0), "tv": 2 * loss.get("l1_alpha", 0.0), "kl_div": loss.get("kl_alpha", 0.0)}
    if loss:
        options["loss_fn"] = json.dumps({name: alpha for name, alpha in terms.items() if alpha})
        options["dflash_decay_gamma"] = loss["decay_gamma"]
        options["max_anchors"] = of["num_anchors"] * recipe["train"]["local_batch_size"]
    drafts_at_anchor = kind in ("dspark", "dflash") and of.get("slots") != "fill_in"
    blocks = {"block_size": of.get("block_size"), "sample_from_anchor": drafts_at_anchor}
    steps = of.get("num_speculative_steps", of.get("ttt_length", of.get("num_depths", of.get("block_size"))))
    match kind:
        case "dspark":
            own = blocks | {"markov_rank": of["markov"]["rank"]}
        case "dflash":
            own = blocks
        case "dflash2":
            convolution, selector = of["convolution"], of["selector"]
            own = blocks | {f"conv_{key}": value for key, value in convolution.items()}
            own |= {"selector_rank": selector["rank"], "selector_top_k": selector["top_k"]}
        case "xpress":
            refiner, consistency = of["refiner"], of["consistency"]
            own = blocks | {"xpress_rank": refiner["rank"], "xpress_mlp_ratio": refiner["mlp_ratio"]}
            options |= {"consistency_weight": consistency["alpha"], "consistency_passes": consistency["passes"]}
            options |= {"base_anchor_weight": of["base_alpha"], "ce_from_data": True}
        case "eagle3":
            own = {"norm_before_residual": False}
            options |= {"ttt_steps": of["ttt_length"], "ttt_step_loss_decay": of["step_loss_decay"]}
        case "peagle":
            # By default its trainer learns the embedding, too; here it is frozen.
            own = {"norm_before_residual": False, "embed_requires_grad": False}
            options |= {key: of[key] for key in ("num_depths", "down_sample_ratio", "down_sample_ratio_min")}
        case "mtp":
            own = {}
            options |= {key: of[key] for key in ("num_speculative_steps", "step_weight_beta")}
    if kind != "mtp":
        named = "eagle_aux_hidden_state_layer_ids" if kind in ("eagle3", "peagle") else "aux_hidden_state_layer_ids"
        own |= {named: [layer + 1 for layer in recipe["target"]["layer_ids"]]}
        own |= {"draft_vocab_size": len(vocab["d2t"]) if vocab else target["vocab_size"]}
        own |= {"mask_token_id": of["mask_token_id"]} if "mask_token_id" in of else {}
    speculators = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=target["architectures"]),
    )
    made = SpeculatorModelConfig.registry[kind](
        transformer_layer_config=decoder, speculators_config=speculators, **own
    )
    model = SpeculatorModel.registry[kind](made).float()
    # In place of the target's embedding and head. MTP-1 drops the second copy of the head when it loads them.
    for weight in (model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight):
        torch.nn.init.normal_(weight, std=0.02)
    if kind == "mtp":
        del model.verifier_lm_head
    if vocab:
        model.load_vocab_mappings(**vocab)
    return model, options


def write_targets(folder, changed):
    """The config.json of the toy target with these sizes, one of Gemma 4 with equal sizes, and a reduced vocabulary."""
    target = json.loads((ROOT / "assets" / "tiny-target" / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(target))
    gemma4 = json.loads((ROOT / "configs" / "shapes" / "gemma4_12b.json").read_text())
    sizes = gemma4["text_config"]
    sizes.update({key: target[key] for key in sizes.keys() & target.keys() - {"model_type", "sliding_window"}})
    sizes["global_head_dim"] = 2 * sizes["head_dim"]
    (folder / "gemma4").mkdir()
    (folder / "gemma4" / "config.json").write_text(json.dumps(gemma4))
    tokens = range(0, target["vocab_size"], target["vocab_size"] // DRAFT_TOKENS)
    d2t = struct.pack(f"<{len(tokens)}q", *(token - draft for draft, token in enumerate(tokens)))
    t2d = bytes(token in tokens for token in range(target["vocab_size"]))
    header = {
        "d2t": {"dtype": "I64", "shape": [len(tokens)], "data_offsets": [0, len(d2t)]},
        "t2d": {"dtype": "BOOL", "shape": [len(t2d)], "data_offsets": [len(d2t), len(d2t) + len(t2d)]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "draft_vocab.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + d2t + t2d)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS | ONLY_HERE))
    parser.add_argument("--shape", default="tiny", help="tiny or medium")
    parser.add_argument("--steps", type=int, nargs=2, metavar="N", help="both lengths; by default 20 60, medium 1 4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS | ONLY_HERE):
        parser.error(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS | ONLY_HERE)}")
    if args.train:
        train(*args.kinds, json.loads(args.shape), args.steps)
        return
    if args.shape not in SHAPES:
        parser.error(f"--shape {args.shape}: the shapes are {', '.join(SHAPES)}")
    changed, tokens, lengths = SHAPES[args.shape]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_targets(Path(folder), changed)
        for kind in args.kinds or KINDS:
            found[kind] = measure(kind, {"target": folder, "tokens": tokens}, args.steps or lengths, args.repeats)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    print("\n".join(tables(found)))


if __name__ == "__main__":
    main()
