"""What `deepspec-data split` is measured against: its input, and the same work done with Hugging Face's datasets.

    split.py make ROWS FILE.parquet          writes ShareGPT conversations, about 1 kB of text a row
    split.py split FILE.parquet TRAIN EVAL   loads, splits with seed 42 and writes both sides as JSON Lines
"""

import sys

import numpy as np

WORDS = 4000
TEXTS = 20_000
ROWS_AT_ONCE = 100_000
ROWS_IN_GROUP = 10_000


def texts(rng, vocabulary, mean_words):
    """Texts whose lengths are spread as those of chats are: many short ones, a few long ones."""
    lengths = np.maximum(3, rng.lognormal(np.log(mean_words) - 0.32, 0.8, TEXTS)).astype(int)
    joins = np.array([" ", ", ", ".\n", ' "', "? "])
    out = []
    for length in lengths:
        # Words follow Zipf's law roughly, as those of texts do.
        words = vocabulary[(WORDS ** rng.random(length)).astype(int) - 1]
        gaps = joins[rng.choice(5, length, p=[0.84, 0.07, 0.05, 0.02, 0.02])]
        out.append("".join(word + gap for word, gap in zip(words, gaps)))
    return np.array(out, dtype=object)


def make(rows, path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(7)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    vocabulary = np.array(["".join(rng.choice(letters, rng.integers(2, 11))) for _ in range(WORDS)], dtype=object)
    asked, answered = texts(rng, vocabulary, 25), texts(rng, vocabulary, 75)
    message = pa.struct([("from", pa.string()), ("value", pa.string())])
    schema = pa.schema([("conversations", pa.list_(message)), ("source", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - start)
            turns = 2 * rng.choice([1, 2, 3], count, p=[0.6, 0.25, 0.15])
            ends = np.concatenate([[0], np.cumsum(turns)])
            speakers = np.tile(np.array(["human", "gpt"], dtype=object), ends[-1] // 2)
            values = np.empty(ends[-1], dtype=object)
            values[0::2] = asked[rng.integers(0, TEXTS, ends[-1] // 2)]
            values[1::2] = answered[rng.integers(0, TEXTS, ends[-1] // 2)]
            # No two rows ask the same.
            for row, first in enumerate(ends[:-1]):
                values[first] = f"{start + row}: {values[first]}"
            messages = pa.StructArray.from_arrays(
                [pa.array(speakers, pa.string()), pa.array(values, pa.string())], fields=list(message)
            )
            lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), messages)
            source = pa.array(rng.choice(np.array(["web", "chat", "code"], dtype=object), count), pa.string())
            table = pa.table([lists, source], schema=schema)
            writer.write_table(table, row_group_size=ROWS_IN_GROUP)


def split(path, train, evaluation):
    import tempfile

    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        rows = load_dataset("parquet", data_files=path, split="train", cache_dir=cache)
        sides = rows.train_test_split(test_size=0.05, seed=42)
        sides["train"].to_json(train)
        sides["test"].to_json(evaluation)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", rows, path]:
            make(int(rows), path)
        case ["split", path, train, evaluation]:
            split(path, train, evaluation)
        case _:
            sys.exit(__doc__)
