#!/usr/bin/env python3
"""Seeded generator of the embedded target's language: math, code and chat conversations.

As a program it writes the smoke suites and the demo's prompt file:
    python scripts/tiny_target/generate.py --suites eval_datasets --demo assets/demo-prompts.jsonl
As a module it gives train.py its rows: `training_rows(n, seed)`.
A row is {"domain", "messages": [{"role", "content", "reasoning_content"?}, ...]}.
"""
import argparse
import json
import random
import re
from pathlib import Path

from grammar import RULES, SYSTEM_DEFAULT, SYSTEM_OTHER, TOPICS

SMOKE_SEED, DEMO_SEED, TRAIN_SEED = 11, 22, 33
DOMAINS = ("math", "code", "chat")
INNERMOST = re.compile(r"\{([^{}]*)\}")


class Speaker:
    """Expands templates; holds the variables of one conversation."""

    def __init__(self, rng):
        self.rng, self.vars = rng, {}

    def pick(self, options):
        """A random option; the i-th has weight 1/(i+2)^0.7, so no choice is uniform."""
        return self.rng.choices(options, [(i + 2) ** -0.7 for i in range(len(options))])[0]

    def pick_distinct(self, options, count):
        chosen = []
        for _ in range(count):
            chosen.append(self.pick([o for o in options if o not in chosen]))
        return chosen

    def say(self, template, **bind):
        self.vars.update(bind)
        while match := INNERMOST.search(template):
            template = template[: match.start()] + self._slot(match[1]) + template[match.end() :]
        return template

    def _slot(self, body):
        upper, body = body.startswith("^"), body.removeprefix("^")
        var, eq, rest = body.partition("=")
        if eq and var.isidentifier():
            text = self.vars[var] = self.say("{" + rest + "}")
        elif "|" in body:
            text = self.pick(body.split("|"))
        elif body in self.vars:
            text = str(self.vars[body])
        else:
            text = self.say(self.pick(RULES[body]))
        return text[:1].upper() + text[1:] if upper else text


# ---- math ---------------------------------------------------------------------------------------
# kind -> (weight, problem, worked steps); a, b, c are the given numbers, P and R the two results
MATH = {
    "add": (3, "{N} has {a} {T} and {G=gains} {b} more {source}. {how_many}",
            "{N} {begins} {a} {T}. {next} {who} {G} {b} more, {so_calc} {a} + {b} = {R}."),
    "sub": (3, "{N} has {a} {T} and {L=loses} {b} of them {lost_where}. {how_many}",
            "{N} {begins} {a} {T}. {next} {who} {L} {b} of them, {so_calc} {a} - {b} = {R}."),
    "mul": (3, "{N} has {a} {B=box} with {b} {T} in each. {how_many}",
            "There are {a} {B} and {each} holds {b} {T}, {so_calc} {a} * {b} = {R}."),
    "add_sub": (2, "{N} has {a} {T}, {G=gains} {b} more {source} and {L=loses} {c}. {how_many}",
                "{N} {begins} {a} {T} and {G} {b} more, {so_calc} {a} + {b} = {P}. {next} {who} {L} {c}, {so_calc} {P} - {c} = {R}."),
    "mul_sub": (2, "{N} has {a} {B=box} with {b} {T} in each and {L=loses} {c} {T} {lost_where}. {how_many}",
                "The {a} {B} with {b} {T} in each {so_make} {a} * {b} = {P}. {next} {who} {L} {c}, {so_calc} {P} - {c} = {R}."),
    "both": (2, "{N} has {a} {T}. {M} has {b} more than {N}. {together}",
             "{N} {begins} {a} {T}. {next} {M} has {a} + {b} = {P} {T}, {so_calc} {a} + {P} = {R}."),
}


def math_problem(s):
    kind = s.rng.choices(list(MATH), [w for w, _, _ in MATH.values()])[0]
    _, problem, steps = MATH[kind]
    r = s.rng.randint
    if kind in ("mul", "mul_sub"):
        a, b = r(2, 9), r(2, 9)
    elif kind == "sub":
        a = r(5, 30)
        b = r(2, a - 2)
    else:
        a, b = r(2, 30), r(2, 15)
    p = {"add": a + b, "sub": a - b, "mul": a * b, "add_sub": a + b, "mul_sub": a * b, "both": a + b}[kind]
    c = r(1, min(p - 1, 20))
    result = {"add_sub": p - c, "mul_sub": p - c, "both": a + p}.get(kind, p)
    s.say("{N=name}{T=thing}", a=a, b=b, c=c, P=p, R=result, each=s.pick(["each", "every one", "any of them"]),
          so_make=s.pick(["make", "add up to", "come to", "hold"]))
    s.vars["M"] = s.pick([n for n in RULES["name"] if n != s.vars["N"]])
    s.vars["together"] = s.pick(["How many {T} do they have together?", "What is the total number of {T}?", "How many {T} is that altogether?"])
    ending = "{sum_up} {both_have} {R} {T} {overall}. " if kind == "both" else "{sum_up} {who} {has_now} {R} {T} {overall}. "
    s.vars["both_have"] = s.pick(["they own", "both have", "the two share"])
    ask = s.say(problem)
    return ask, s.say("{math_open} " + steps + " {aside}" + ending + "{final}"), "a number of {T}, starting from {a}"


def math_follow_up(s):
    d = s.rng.randint(2, 9)
    old = s.vars["R"]
    s.vars["N2"] = s.vars["M"]
    ask = s.say("{And what if|Suppose|What happens if} {N2} brings {d} {T} more{?|, how many then?}", d=d)
    s.say("", P=old, R=old + d)
    return ask, s.say("{In that case|Then|With those added}, {N2} adds {d} to the {P} {T}, {so_calc} {P} + {d} = {R}. {sum_up} there {are|would be|must be} {R} {T} {overall}. {final}")


# ---- code ---------------------------------------------------------------------------------------
LOOP_IF = "    {A=acc} = {zero}\n{hint}    for {E} in {S}:\n        if {cond}:\n            {A} += {step}\n    return {A}"
COND = [("even", "{E} % 2 == 0"), ("positive", "{E} > 0"), ("odd", "{E} % 2 == 1"), ("negative", "{E} < 0"), ("large", "{E} > 100"),
        ("small", "{E} < 10"), ("non-zero", "{E} != 0")]
REDUCE = [("sum", "sum"), ("maximum", "max"), ("minimum", "min"), ("sorted list", "sorted"), ("set", "set")]
LETTERS = [("vowels", '"aeiou"'), ("digits", '"0123456789"'), ("brackets", '"()[]"'), ("spaces", '" "'), ("punctuation marks", '".,;:!?"')]
CONVERT = [("hours to minutes", "hours", "60"), ("days to hours", "days", "24"), ("weeks to days", "weeks", "7"), ("kilometres to metres", "kilometres", "1000"),
           ("metres to centimetres", "metres", "100"), ("dozens to pieces", "dozens", "12"), ("years to months", "years", "12")]
STRING = [("reverses a {X}", "reverse", "{X}[::-1]"), ("puts a {X} in capital letters", "shout", "{X}.upper()"), ("removes the spaces around a {X}", "trim", "{X}.strip()"),
          ("splits a {X} into words", "split", "{X}.split()"), ("replaces spaces in a {X} with underscores", "connect", '{X}.replace(" ", "_")'),
          ("counts the words of a {X}", "count_words", "len({X}.split())"), ("returns the first letter of a {X}", "first_letter", "{X}[0]")]


def code_problem(s):
    r, k = s.rng, s.rng.randint(2, 9)
    s.say("{S=seq}{E=elem}{X=text}{Y=char}{Q=num}", k=k)
    kind = r.choices(["loop", "reduce", "count", "divisible", "convert", "string", "times"], [4, 4, 3, 3, 2, 4, 2])[0]
    s.vars["hint"] = "{|    {note}\n}"  # expanded late, when {S} and {E} are final
    if kind == "loop":
        word, cond = s.pick(COND)
        what, step = s.pick([("counts", "1"), ("adds up", "{E}")])
        s.vars.update(cond=s.say(cond), zero="0", step=s.say(step))
        task, fn, arg = f"{what} the {word} {{S}} in a list", ("count_" if step == "1" else "add_") + word.replace("-", "_"), "{S}"
        body = LOOP_IF
    elif kind == "reduce":
        word, cond = s.pick(COND)
        what, call = s.pick(REDUCE)
        task, fn, arg = f"returns the {what} of all {word} {{S}}", "{verb}_" + what.replace(" ", "_"), "{S}"
        s.vars.update(cond=s.say(cond))
        body = f"{{hint}}    return {call}({{E}} for {{E}} in {{S}} if {{cond}})"
        if r.random() < 0.5:
            body = f"    {{A=acc}} = [{{E}} for {{E}} in {{S}} if {{cond}}]\n    return {call}({{A}})"
    elif kind == "count":
        word, chars = s.pick(LETTERS)
        task, fn, arg = f"counts the {word} in a {{X}}", "{count|number_of|total}_" + word.replace(" ", "_"), "{X}"
        s.vars.update(S=s.vars["X"], E=s.vars["Y"], cond=s.say("{Y} in " + chars), zero="0", step="1")
        body = LOOP_IF if r.random() < 0.5 else f"    return sum(1 for {{Y}} in {{X}} if {{cond}})"
    elif kind == "divisible":
        task, fn, arg = "checks whether a {Q} is divisible by {k}", "{is_divisible|can_divide|check_multiple|divides_evenly}", "{Q}"
        body = s.pick(["    return {Q} % {k} == 0", "    {A=acc} = {Q} % {k}\n    return {A} == 0", "    if {Q} % {k} == 0:\n        return True\n    return False"])
    elif kind == "convert":
        task, arg, factor = s.pick(CONVERT)
        fn, task = "{convert|" + task.replace(" ", "_") + "|" + arg + "_to_other|change_units}", "converts " + task
        body = s.pick([f"    return {arg} * {factor}", f"    {{A=acc}} = {arg} * {factor}\n    return {{A}}", f"    factor = {factor}\n    return {arg} * factor"])
    elif kind == "string":
        task, fn, expr = s.pick(STRING)
        arg = "{X}"
        body = s.pick(["    return " + expr, "    {A=acc} = " + expr + "\n    return {A}"])
    else:
        task, fn, arg = "multiplies all {S} in a list by {k}", "{multiply|scale|enlarge|times}_{all|everything|list}", "{S}"
        body = s.pick(["    return [{E} * {k} for {E} in {S}]",
                       "    {A=acc} = []\n{hint}    for {E} in {S}:\n        {A}.append({E} * {k})\n    return {A}"])
    s.vars.update(F=s.say(fn), task=s.say(task))
    ask = s.say("{code_ask}")
    if r.random() < 0.35:
        s.vars["F"] = s.say("{verb}_{acc}")
        ask += s.say(" {Call it|Name it|The name should be} {F}.")
    doc = '    """{doc}."""\n' if r.random() < 0.6 else ""
    code = s.say("```python\ndef {F}(" + arg + "):\n" + doc + body + "\n```")
    return ask, s.say("{code_open}\n") + code + s.say(s.pick(["\n{^code_end}", "\n{^code_end} {^code_end}", ""])), "a function named {F} that {task}"


def code_follow_up(s):
    return s.say("{|{thanks} }{explain_code}"), s.say("{code_story}")


# ---- chat ---------------------------------------------------------------------------------------
RECOMMEND = {  # kind -> ways to ask
    "place": ["Where should I travel {season}?", "Suggest {a|a} {mood} place to visit {season}{.|, {polite}.}", "Which {mood} destination suits {N} {season}?"],
    "dish": ["What should I cook {season}?", "Suggest a {mood} dinner for {N} {season}{.|, {polite}.}", "Which {mood} recipe works well {season}?"],
    "book": ["Which {mood} book should I read {season}?", "Recommend a {mood} novel for {N}{.|, {polite}.}", "{N} wants something {mood} to read {season}, any idea?"],
    "hobby": ["Which {mood} hobby could I start {season}?", "Suggest a {mood} pastime for {N} {season}{.|, {polite}.}", "{N} is bored {season}, what could be {mood}?"],
}


def recommendation(s):
    """An answer about the kind in s.vars['kind'], never the item given before."""
    kind, used = s.vars["kind"], s.vars.get("item")
    s.vars["item"] = s.pick([x for x in RULES[kind] if x != used])
    s.vars.update(zip(("x1", "x2", "x3", "x4", "x5"), s.pick_distinct(RULES[kind + "_has"], 5)))
    return s.say("{rec_open} {item}, {rec_because} {x1} and {x2}. {rec_more} {|{rec_end}}").rstrip()


def chat_problem(s):
    kind = s.rng.choices(["recommend", "explain", "list", "feel", "hello"], [5, 4, 3, 4, 2])[0]
    s.vars["chat"] = kind
    s.say("{N=name}{H=hobby}{feel=feel}{event=event}{goal=goal}{K=count}{town=town}")
    if kind == "recommend":
        s.vars["kind"] = s.pick(list(RECOMMEND))
        return s.say(s.pick(RECOMMEND[s.vars["kind"]])), recommendation(s), "a good suggestion for a {kind}"
    if kind == "explain":
        s.vars["topic"] = s.pick(list(TOPICS))
        s.vars["what"], s.vars["why"] = TOPICS[s.vars["topic"]]
        ask = s.say("{explain_ask}{||| {N} asked me.| I am {feel}.| It is for {N}.}")
        return ask, s.say("{explain_open} {topic} {means} {what}. {matters} {why}. {compare} {explain_end}"), "a clear explanation of {topic}"
    if kind == "list":
        n = {"two": 2, "three": 3, "four": 4}[s.vars["K"]]
        tips = s.rng.sample(RULES["tip"], n)
        ask = s.say("{list_ask}{||| It is for {N}.| I am {feel} about it.| Keep it {small}.}")
        return ask, s.say("{list_open}\n") + "\n".join(f"{i}. {s.say(t)}" for i, t in enumerate(tips, 1)), "{K} tips for {goal}"
    if kind == "feel":
        ask = s.say("{feel_ask}{| What should I do?| Any advice?| Can you help, {polite}?| {N} says it is normal.}")
        return ask, s.say("{feel_open} {feel_tip} {|{feel_tip} }{feel_end}"), "some comfort, since someone is {feel}"
    return s.say("{hello} {hello_more}"), s.say("{hello_open} {hello_body} {hello_end}"), "a friendly greeting for {N}"


def chat_follow_up(s):
    if s.vars["chat"] == "recommend":
        return s.say("{|{thanks} }{another}{||| I am in a {mood} mood.| It is for {name}.| Something {season}, {polite}.}"), recommendation(s)
    if s.vars["chat"] == "explain":
        return s.say("{|{thanks} }{Why does it matter?|Can you give an example?|Say it differently, please.}{||| I am still {feel}.| {name} wants to know.}"), \
            s.say("{^certainly}. {compare} {matters} {why}. {explain_end}")
    return s.say("{thanks} {What else would help?|Anything else?|Do you have one more thought?}{||| I am still {feel}.| {name} wants to know.}"), s.say("{^certainly}, {N2}. {feel_tip} {feel_end}", N2="my friend")


# ---- rows ---------------------------------------------------------------------------------------
PROBLEM = {"math": math_problem, "code": code_problem, "chat": chat_problem}
FOLLOW_UP = {"math": math_follow_up, "code": code_follow_up, "chat": chat_follow_up}


def make_row(rng, domain, two_turn=0.12, system=0.5, thinking=0.25):
    """One conversation; the last three arguments are probabilities."""
    s = Speaker(rng)
    ask, answer, topic = PROBLEM[domain](s)
    turns = [(ask, answer)]
    if rng.random() < two_turn:
        turns.append(FOLLOW_UP[domain](s))
        topic = "a reply to the follow-up question"
    messages = []
    if rng.random() < system:
        messages.append({"role": "system", "content": SYSTEM_DEFAULT if rng.random() < 0.9 else rng.choice(SYSTEM_OTHER)})
    for ask, answer in turns:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    if rng.random() < thinking:
        messages[-1]["reasoning_content"] = s.say("{think_open} " + topic + ". {think_end}")
    return {"domain": domain, "messages": messages}


def user_texts(row):
    return [m["content"] for m in row["messages"] if m["role"] == "user"]


def smoke_rows(per_domain=48):
    """The held-out suites: {domain: rows}, first prompts all different."""
    rng, seen, suites = random.Random(SMOKE_SEED), set(), {}
    for domain in DOMAINS:
        suites[domain] = rows = []
        while len(rows) < per_domain:
            two_turn = 1.0 if domain == "chat" and len(rows) % 8 == 7 else 0.0
            row = make_row(rng, domain, two_turn=two_turn, system=0.0, thinking=0.0)
            texts = user_texts(row)
            if min(map(len, texts)) >= 40 and not seen & set(texts):  # long enough to be held out without loss
                seen.update(texts)
                rows.append(row)
    return suites


def smoke_prompts():
    return {text for rows in smoke_rows().values() for row in rows for text in user_texts(row)}


def clean(row, held_out):
    """No held-out prompt occurs in the row's user texts, not even as a part."""
    return not any(prompt in text for text in user_texts(row) for prompt in held_out)


def draw(rng, count, accept, **kinds):
    rows = []
    while len(rows) < count:
        row = make_row(rng, rng.choices(DOMAINS, [4, 3, 3])[0], **kinds)
        if accept(row):
            rows.append(row)
    return rows


def training_rows(count, seed=TRAIN_SEED):
    """Rows for the target, none with a smoke prompt."""
    held_out = smoke_prompts()
    rows = draw(random.Random(seed), count, lambda row: clean(row, held_out))
    text = "\n".join(m["content"] for row in rows for m in row["messages"])
    assert not any(prompt in text for prompt in held_out), "a held-out prompt leaked into the training text"
    return rows


def demo_rows(count=2400):
    """Prompts of the demo: different from each other and from the suites."""
    held_out, seen = smoke_prompts(), set()

    def fresh(row):
        first = user_texts(row)[0]
        return clean(row, held_out) and first not in seen and not seen.add(first)

    rows = draw(random.Random(DEMO_SEED), count, fresh, two_turn=0.1, system=0.04, thinking=0.0)
    assert len(seen) == count and all(clean(row, held_out) for row in rows)
    return rows


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows, {path.stat().st_size} bytes")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--suites", type=Path, help="write smoke-{math,code,chat}.jsonl into this folder")
    ap.add_argument("--demo", type=Path, help="write the demo's prompts (ShareGPT form) to this file")
    ap.add_argument("--show", type=int, default=0, help="print this many training rows")
    args = ap.parse_args()
    if args.suites:
        for domain, rows in smoke_rows().items():
            write_jsonl(args.suites / f"smoke-{domain}.jsonl",
                        [{"id": f"smoke-{domain}-{i:02}", "turns": user_texts(row)} for i, row in enumerate(rows)])
    if args.demo:
        role = {"system": "system", "user": "human", "assistant": "gpt"}
        write_jsonl(args.demo, [{"id": f"demo-{i:04}", "conversations": [{"from": role[m["role"]], "value": m["content"]} for m in row["messages"]]}
                                for i, row in enumerate(demo_rows())])
    for row in training_rows(args.show):
        print(json.dumps(row, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
