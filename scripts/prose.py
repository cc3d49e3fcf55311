#!/usr/bin/env python3
"""Checks the prose of README, docs and help texts: lengths of sentences and lines, and words that only this project used.

    scripts/prose.py [FILE]...     default: README.md, CHANGELOG.md, docs/*.md and the heads of all scripts

A sentence has at most 25 words, a line of text at most 120 characters. Code, tables and links do not count as words.
Help texts of programs are checked where docs/commands.md and docs/recipe.md print them. A script is checked only in
the comment or docstring that its `--help` prints. `scripts/book.py check` runs this check, too.
"""

import ast
import itertools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_WORDS = 25
MOST_CHARACTERS = 120
# Words of this project's first years, and the field's words that took their place.
DEAD = {
    r"anchored drafters?": "block drafter",
    r"foretells?|foretold": "estimate",
    r"lanes?": "engine replica",
    r"slopes?": "gradient",
    r"dialects?": "checkpoint format",
    r"obstacles?": "incompatibility",
    r"shel(?:f|ves)": "cache",
    r"histor(?:y|ies) of (?:keys|a sequence)": "KV cache",
    r"trainees?": "drafter",
    r"misfits?": "config error",
    r"sureness": "confidence interval",
    r"plausible": "valid",
    r"not calm|calm": "healthy",
    r"patience": "timeout",
    r"taken? in": "append",
    r"let(?:s)? go of": "release",
    r"nobody": "no one, or name who",
    r"what (?:came|becomes|became) of": "the result",
    r"as told|is told|are told|were told|be told|was told": "reports, or states",
}
# Flags of earlier versions, which only these pages may name.
OLD_FLAGS = re.compile(r"(?<![-\w])--(?:slots|lanes|shard|patience|attempts|embedded|link|held-out|fold|matrices|draft-in-turn)(?![-\w])")
ABOUT_OLD_FLAGS = {"CHANGELOG.md", "migrating.md"}
# Pages that programs write.
WRITTEN = {"commands.md", "recipe.md"}
BANNED_STARTS = re.compile(r"(What|Those|Of|The same)\b(?![^.]*\?)")


def paragraphs(text):
    """(line number, text) of each paragraph, list item, heading and table cell."""
    fence, current, start = False, [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
            line = ""
        elif fence:
            continue
        line = re.sub(r"^\s*>\s?", "", line)
        starts = re.match(r"\s*([-*+]|\d+\.|#+|\|)\s?", line)
        if current and (not line.strip() or starts):
            yield start, " ".join(current)
            current = []
        if line.lstrip().startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                yield number, cell.strip()
        elif line.strip():
            if not current:
                start = number
            current.append(re.sub(r"^\s*([-*+]|\d+\.|#+|>)\s+", "", line).strip())
    if current:
        yield start, " ".join(current)


def plain(text):
    """Text as it is read: code counts as one word, links as their texts."""
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)


def sentences(text):
    return [part for part in re.split(r"(?<=[.!?:;])\)?\s+(?=[A-Z0-9\"(]|code)", plain(text)) if part.strip()]


def problems(page, text):
    """(line number, problem) of a page."""
    for start, paragraph in paragraphs(text):
        for sentence in sentences(paragraph):
            words = len([word for word in sentence.split() if re.search(r"\w", word)])
            if words > MOST_WORDS:
                yield start, f"{words} words in a sentence, at most {MOST_WORDS}: {sentence[:70]}…"
            if BANNED_STARTS.match(sentence):
                yield start, f"a sentence begins with {sentence.split()[0]}: {sentence[:70]}…"
        for dead, better in DEAD.items():
            found = re.search(rf"(?i)\b(?:{dead})\b", plain(paragraph))
            if found:
                yield start, f"\"{found[0]}\" is not the field's word; say {better}"
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        if page.name not in ABOUT_OLD_FLAGS:
            yield from ((number, f"{flag} is a flag of earlier versions") for flag in OLD_FLAGS.findall(line))
        if line.lstrip().startswith("```"):
            fence = not fence
        is_text = not fence and not line.lstrip().startswith(("|", "<")) and " " in re.sub(r"\]\([^)]*\)", "", line)
        # Programs write long lines into their own pages, and a link's address cannot be broken.
        shown = re.sub(r"\]\([^)]*\)", "]", line)
        if is_text and len(shown) > MOST_CHARACTERS and page.name not in WRITTEN:
            yield number, f"{len(shown)} characters in a line, at most {MOST_CHARACTERS}"


def scripts():
    return [file for file in sorted((ROOT / "scripts").rglob("*")) if file.suffix in (".sh", ".sbatch", ".py")]


def read(page):
    """The text of a page, or what `--help` of a script prints, line by line at its place. Indented lines are a table."""
    text = page.read_text()
    if page.suffix == ".md":
        return text
    if page.suffix == ".py":
        text = "\n" * (ast.parse(text).body[0].lineno - 1) + (ast.get_docstring(ast.parse(text), clean=False) or "")
    else:
        head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        text = "\n".join("" if re.match("#!|#SBATCH|# shellcheck", line) else line[2:] for line in head)
    return re.sub(r"(?m)^ {2,}(.*)$", r"| \1 |", text)


def main(arguments):
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    pages = [pathlib.Path(name) for name in arguments]
    pages = pages or [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")), *scripts()]
    count = 0
    for page in pages:
        for number, problem in problems(page, read(page)):
            print(f"{page}:{number}: {problem}")
            count += 1
    print(f"prose: {len(pages)} pages, {count} problems")
    sys.exit(count > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
