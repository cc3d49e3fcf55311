#!/usr/bin/env python3
"""Compares training steps here and in the trainer of speculators 0.9, drafter by drafter: processor time and memory.

    scripts/compare-speculators.py [KIND]...                by default all kinds that both train, as in configs/tiny
    scripts/compare-speculators.py --steps 20 60            both lengths of training
    scripts/compare-speculators.py --shape medium dspark    hidden 512, a vocabulary of 32,768, 4 samples of 512 tokens
    scripts/compare-speculators.py --json FILE              also writes every single measurement

Prints the tables of docs/measurements.md, without the columns that say where and when. Needs a build and a Python with
scripts/requirements-speculators.txt, which DEEPSPEC_SPECULATORS_PYTHON names (default: .venv-speculators/bin/python).

Both sides train drafters of equal sizes on random states, in float32 on one thread, with AdamW and clipped gradients.
The script stops if the numbers of trained weights differ.

- Here that is `deepspec-train --bench` with the recipe in configs/tiny.
- There it is speculators' own `Trainer.train_epoch`, with its models, losses, optimiser, schedule and collation.
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
}
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


def here(kind, shape, lengths):
    """Seconds of a step, loaded and peak bytes and trained weights of `deepspec-train --bench`."""
    settings = [f"target.model={shape['target']}", f"data.max_length={shape['tokens']}"]
    command = [ROOT / "target" / "release" / "deepspec-train", "--quiet", "--device", "cpu", "--json"]
    command += ["--config", f"configs/tiny/{kind}.yaml", *(each for setting in settings for each in ("--set", setting))]
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
    sides = {"here": here, "there": there}
    found = {side: {"seconds": [], "above": [], "peak": []} for side in sides}
    weights = {}
    for number in range(repeats):
        for side, run in sides.items():
            seconds, loaded, peak, weights[side] = run(kind, shape, lengths)
            found[side]["seconds"].append(seconds)
            found[side]["above"].append(peak - loaded)
            found[side]["peak"].append(peak)
            print(f"{kind}, {side}, {number + 1} of {repeats}", file=sys.stderr, flush=True)
    if weights["here"] != weights["there"]:
        raise SystemExit(f"{kind}: {weights['here']} weights are trained here and {weights['there']} there")
    return found | {"weights": weights["here"]}


def tables(found):
    """Rows for docs/measurements.md, without the columns that say where and when."""
    lines = ["| measured | figure |", "|---|---|"]
    for kind, of in found.items():
        cells = (spread(of[side]["seconds"], 1e3, 0) for side in ("here", "there"))
        lines.append(f"| {KINDS[kind]}, {of['weights'] / 1e6:.2f} M weights | {'; '.join(cells)}; {ratio(of, 'seconds')} |")
    lines += ["", "| measured | figure |", "|---|---|"]
    for kind, of in found.items():
        cells = (spread(of[side]["above"], 1e-6, 0) for side in ("here", "there"))
        peaks = ", ".join(f"{statistics.median(of[side]['peak']) / 1e6:,.0f}" for side in ("here", "there"))
        lines.append(f"| {KINDS[kind]} | {'; '.join(cells)}; {ratio(of, 'above')}; peaks {peaks} |")
    return lines


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
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.mtp.data import shift_batch_mtp
    from speculators.train import trainer
    from speculators.train.data import BaseDataset, CollateFn

    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    recipe = yaml.safe_load((ROOT / "configs" / "tiny" / f"{kind}.yaml").read_text())
    target = json.loads((ROOT / shape["target"] / "config.json").read_text())
    samples, tokens = recipe["train"]["local_batch_size"], shape["tokens"]
    taps = len(recipe["target"].get("layer_ids", ()))
    model, options = build(kind, recipe, target)

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


def build(kind, recipe, target):
    """The drafter of a recipe in speculators with random weights, and what its training options are."""
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    of = recipe["drafter"][kind]
    layers = of.get("num_draft_layers", 1)
    sizes = {key: value for key, value in target.items() if key not in ("layer_types", "model_type")}
    decoder = Qwen3Config(**{**sizes, "num_hidden_layers": layers, "tie_word_embeddings": False})
    decoder._attn_implementation = "sdpa"
    loss = of.get("loss", {})
    options = {"loss_implementation": "eager", "loss_fn": "kl_div", "per_position_loss_weight": "fixed-exp-decay"}
    # Total variation is half of the L1 distance.
    terms = {"ce": loss.get("ce_alpha", 0.0), "tv": 2 * loss.get("l1_alpha", 0.0)}
    if loss:
        options["loss_fn"] = json.dumps({name: alpha for name, alpha in terms.items() if alpha})
        options["dflash_decay_gamma"] = loss["decay_gamma"]
        options["max_anchors"] = of["num_anchors"] * recipe["train"]["local_batch_size"]
    blocks = {"block_size": of.get("block_size"), "sample_from_anchor": kind in ("dspark", "dflash")}
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
        own |= {"draft_vocab_size": target["vocab_size"], named: [layer + 1 for layer in recipe["target"]["layer_ids"]]}
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
    return model, options


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--shape", default="tiny", help="tiny or medium")
    parser.add_argument("--steps", type=int, nargs=2, metavar="N", help="both lengths; by default 20 60, medium 1 4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS)}")
    if args.train:
        train(*args.kinds, json.loads(args.shape), args.steps)
        return
    if args.shape not in SHAPES:
        parser.error(f"--shape {args.shape}: the shapes are {', '.join(SHAPES)}")
    changed, tokens, lengths = SHAPES[args.shape]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        target = json.loads((ROOT / "assets" / "tiny-target" / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps(target | changed))
        for kind in args.kinds or KINDS:
            found[kind] = measure(kind, {"target": folder, "tokens": tokens}, args.steps or lengths, args.repeats)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    print("\n".join(tables(found)))


if __name__ == "__main__":
    main()
