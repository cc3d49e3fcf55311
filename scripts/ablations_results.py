"""Accepted lengths that scripts/ablations.py reads from evaluations, and the statistics of its tables."""

import json
import math

SEEDS = (1, 2, 3)
# Two-sided 95 % quantile of Student's t with len(SEEDS) - 1 = 2 degrees of freedom.
T_QUANTILE = 4.303
# Choices of drafted tokens above temperature 0.
RULES = ("greedy", "probabilistic")


class Accepted:
    """Accepted lengths of an evaluation, as means over its suites."""

    def __init__(self, results):
        report = json.loads(results.read_text())
        own, other = report["overall"], report["other_rule"]
        self.drafts = len(own["rates"])
        self.by_rule = {report["settings"]["draft_sampling"]: own, other["draft_sampling"]: other}
        # By the draft rule that is the default of the kind.
        self.length = own["accepted_length"]

    def of(self, rule):
        return self.by_rule[rule]["accepted_length"]

    def within(self, rule):
        """Interval of the bootstrap over the prompts."""
        found = self.by_rule[rule]["accepted_length_interval"]
        return f"({found['low']:.2f} … {found['high']:.2f})"


def mean(values):
    return sum(values) / len(values)


def interval(values):
    """Half width of the 95 % interval of a mean."""
    centre = mean(values)
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))
    return T_QUANTILE * deviation / math.sqrt(len(values))


def by_rule(runs):
    """Cells: mean by each draft rule, and its interval."""
    for rule in RULES:
        taus = [run.of(rule) for run in runs]
        yield f"{mean(taus):.2f} " + (f"± {interval(taus):.2f}" if len(runs) > 1 else runs[0].within(rule))
