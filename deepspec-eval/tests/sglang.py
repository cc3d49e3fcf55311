"""What SGLang's own readers make of our files. Its engine needs a GPU; these parts of it need none, and nothing else of it is imported.

usage: sglang.py costs COST.json TEMPERATURES.json REQUESTS:BUDGET...    seconds of steps, and the temperatures
       sglang.py table PROBES.json                                       the table of rates that its profiler writes for [[tokens, steps/s], ...]
       sglang.py draft CONFIG.json                                       what it takes for the settings of a DSpark
       sglang.py block CONFIG.json...                                    what it takes for those of a DFlash, a DSpark or a Domino
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import types
from unittest.mock import MagicMock

OURS = "sglang.srt.speculative."
LAYERS = "sglang.srt.models.dflash"
READ = (OURS + "dflash_utils", OURS + "dspark_components.dspark_config", OURS + "dspark_components.dspark_sps",
        OURS + "dspark_components.dspark_sts")


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        # A module asks its device at import; nothing else of these is called.
        return (lambda: False) if name.startswith("is_") else MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules that are read come from the installed package, all others of it stand in for themselves."""

    def find_spec(self, name, path=None, target=None):
        if name != "sglang" and not name.startswith("sglang."):
            return None
        if name in READ or name == LAYERS:
            file = importlib.metadata.distribution("sglang").locate_file(name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
utils, config, sps, sts = [importlib.import_module(name) for name in READ]


class Config(types.SimpleNamespace):
    """The settings of a drafter as attributes."""

    def get_text_config(self):
        return self


def block(read):
    of = utils.parse_dflash_draft_config(draft_hf_config=read)
    layers = importlib.import_module(LAYERS)
    kinds = [layers._get_dflash_layer_attention_params(Config(**read), layer)[1] for layer in range(of.num_hidden_layers)]
    return {
        "domino": of.is_domino, "block_size": of.block_size, "target_layer_ids": of.target_layer_ids, "mask_token_id": of.mask_token_id,
        "shift_label": of.shift_label, "gru_hidden_dim": of.gru_hidden_dim, "emb_dim": of.emb_dim, "layers": of.num_hidden_layers,
        "target_layers": of.num_target_layers, "sinks": of.attention_sink_bias,
        "causal": [kind is layers.AttentionType.DECODER for kind in kinds],
    }


what, arguments = sys.argv[1], sys.argv[2:]
if what == "costs":
    table = sps.load_sps_table_from_path(arguments[0])
    steps = [[int(number) for number in each.split(":")] for each in arguments[2:]]
    seconds = [table.step_time(num_reqs=requests, budget=budget) for requests, budget in steps]
    print(json.dumps({"seconds": seconds, "temperatures": sts.load_sts_calibration_from_path(arguments[1]).temperatures}))
elif what == "table":
    print(sps.profile_sps_table(probes=json.load(open(arguments[0]))).to_json())
elif what == "block":
    print(json.dumps([block(json.load(open(path))) for path in arguments]))
else:
    read = json.load(open(arguments[0]))
    of = config.parse_dspark_draft_config(draft_hf_config=read)
    print(json.dumps({
        "gamma": of.gamma, "target_layer_ids": of.target_layer_ids, "mask_token_id": of.mask_token_id, "markov_rank": of.markov_rank,
        "markov_head_type": of.markov_head_type, "layers": of.num_hidden_layers, "target_layers": of.num_target_layers,
        "sample_from_anchor": config.get_dspark_sample_from_anchor(read), "class": read["architectures"],
    }))
