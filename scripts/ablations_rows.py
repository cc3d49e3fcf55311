"""Rows of the tables that scripts/ablations.py makes: drafters, and their changes to the recipes of configs/tiny."""

import json

KINDS = {
    "dspark": "DSpark",
    "dspark_v4": "DSpark of DeepSeek-V4",
    "dflash": "DFlash",
    "jetspec": "JetSpec (causal DFlash)",
    "dflash2": "DFlash 2",
    "xpress": "xPress",
    "domino": "Domino",
    "eagle3": "Eagle3",
    "peagle": "P-EAGLE",
    "mtp": "MTP-1",
}
BLOCK = "drafter.dspark"
VARIANTS = {
    "recipe (2 layers, γ 7, vanilla r 64)": [],
    "no Markov head": [f"{BLOCK}.markov=null", f"{BLOCK}.confidence.with_markov=false"],
    "gated head": [f"{BLOCK}.markov.type=gated"],
    "rnn head": [f"{BLOCK}.markov.type=rnn"],
    "1 layer": [f"{BLOCK}.num_draft_layers=1"],
    "3 layers": [f"{BLOCK}.num_draft_layers=3"],
    "γ 4": [f"{BLOCK}.block_size=4"],
    "γ 8": [f"{BLOCK}.block_size=8"],
    "γ 16": [f"{BLOCK}.block_size=16"],
}

# Objectives of SHORT steps, by drafter. The first of each drafter is its recipe's.
BLOCK_VERIFICATION = "block_verification: {alpha: 0.9}"
OBJECTIVES = {
    "dspark": {
        "0.1 CE + 0.9 L1": [],
        "0.1 CE + 0.9 BV": [f"drafter.dspark.loss={{ce_alpha: 0.1, {BLOCK_VERIFICATION}, decay_gamma: 4.0}}"],
    },
    "dflash": {
        "CE": [],
        "CE up to the first error (Spec-AUF)": [
            "drafter.dflash.loss={ce_alpha: 1.0, until_first_error: true, decay_gamma: 4.0}"
        ],
        "0.1 CE + 0.9 L1": ["drafter.dflash.loss={ce_alpha: 0.1, l1_alpha: 0.9, decay_gamma: 4.0}"],
        "0.1 CE + 0.9 BV": [f"drafter.dflash.loss={{ce_alpha: 0.1, {BLOCK_VERIFICATION}, decay_gamma: 4.0}}"],
    },
}

# All kinds with about as many trained weights as DSpark has on the toy, and Eagle3 with the layer of its recipe. MTP-1 has one layer
# of the target's shape, and so half of them.
EQUAL_SIZES = {
    **{title: (drafter, ()) for drafter, title in KINDS.items() if drafter not in ("dspark_v4", "eagle3")},
    "xPress on DFlash 2": ("xpress", ("drafter.xpress.backbone=dflash2",)),
    "DSpark of DeepSeek-V4, experts of width 40": ("dspark_v4", ("drafter.dspark_v4.stage_config.moe_intermediate_size=40",)),
    "Eagle3, 2 layers": ("eagle3", ("drafter.eagle3.num_draft_layers=2",)),
    "Eagle3, 1 layer": ("eagle3", ()),
}

# On other targets, whose vocabularies weigh more in some kinds than in others: kinds whose depth is chosen, and the width of experts.
DEEPENED = ("dflash", "jetspec", "domino", "peagle", "eagle3")
MOST_LAYERS = 6
EXPERTS = "drafter.dspark_v4.stage_config.moe_intermediate_size"

# Blocks of 15 drafts: a block of xPress counts its anchor, one of DSpark does not.
LONG_XPRESS = ("xpress", ("drafter.xpress.block_size=16",))
LONG_BLOCKS = {
    "DSpark": ("dspark", (f"{BLOCK}.block_size=15",)),
    "DFlash": ("dflash", ("drafter.dflash.block_size=15",)),
    "xPress, 6 passes": LONG_XPRESS,
    "xPress on DFlash 2, 6 passes": ("xpress", (*LONG_XPRESS[1], "drafter.xpress.backbone=dflash2")),
}
# Passes of the refiner over a drafted block. Training does not depend on their number.
PASSES = (1, 2, 4, 6, 8)
# Numbers of drafts whose cycles are timed.
DRAFT_LENGTHS = (4, 7, 10, 13, 16)
# Depth against the Markov head.
DEPTHS = {
    "DSpark, 2 layers": ("dspark", ()),
    "DFlash, 5 layers": ("dflash", ("drafter.dflash.num_draft_layers=5",)),
}
# Options of the kinds that have them. The reduced vocabulary holds the most frequent half of the tokens.
DRAFT_VOCAB, DRAFT_VOCAB_SIZE = "draft_vocab.safetensors", 512
OPTIONS = {
    "DSpark": ("dspark", ()),
    "DSpark with attention sinks": ("dspark", (f"{BLOCK}.attention_sinks=true",)),
    "P-EAGLE": ("peagle", ()),
    f"P-EAGLE, {DRAFT_VOCAB_SIZE} tokens": ("peagle", (f"drafter.peagle.draft_vocab={DRAFT_VOCAB}",)),
    "Eagle3, 1 layer": ("eagle3", ()),
    f"Eagle3, 1 layer, {DRAFT_VOCAB_SIZE} tokens": ("eagle3", (f"drafter.eagle3.draft_vocab={DRAFT_VOCAB}",)),
}
# On a target of scripts/toy_gemma4.py: its assistant, half as wide and with as many heads, and kinds that any target can have. An
# assistant reads the states that enter the target's last layer of each attention type. It has the samples and steps of MTP-1.
ASSISTANT = {"hidden_size": 96, "intermediate_size": 512, "num_attention_heads": 6}
ASSISTANT_CACHE, ASSISTANT_TAPS = "cache-assistant", [3, 4]
ASSISTANTS = {
    "DSpark": ("dspark", ()),
    "DFlash 2": ("dflash2", ()),
    "MTP-1": ("mtp", ()),
    "Eagle3, 1 layer": ("eagle3", ()),
    "Gemma 4 assistant, 4 layers": (
        "mtp",
        (
            f"data.states.cache={ASSISTANT_CACHE}",
            f"target.layer_ids={ASSISTANT_TAPS}",
            f"drafter={json.dumps({'gemma4_assistant': ASSISTANT})}",
        ),
    ),
}
