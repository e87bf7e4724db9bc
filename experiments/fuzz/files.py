"""Data to try: text, JSONL, the three forms of token shards, a folder of `jaxblock tokenize`, tokenizer files, labelled
texts; each damaged in one way."""

import contextlib
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fuzz.cases import CONFIG, Case, Entry, Folder, Link, Pipe
from jaxblock.cli import main
from jaxblock.training.tokenizers import FileTokenizer

VOCAB = 300
TINY = f"""
[run]
name = "tiny"
steps = 1
[model]
vocab_size = {VOCAB}
context = 8
depth = 1
width = 8
heads = 2
feed_forward = "relu"
norm = "rms_norm"
positions = "none"
[data]
batch = 2
validation_tokens = 64
[sample]
length = 2
""".encode()
WORDS = ["the", "quick", "brown", "fox", "naïve", "😀", "jumps", "over", "lazy", "dogs", "and", "runs"]
JSON_TEXTS = [
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "-1",
        "0",
        "1",
        "1.5",
        "true",
        "null",
        "[]",
        "{}",
        '""',
        '"\\ud800"',
        '"x"',
    ),
    *(
        "1e400",
        "9" * 400,
        "9" * 5000,
        "4294967296",
        "18446744073709551616",
        "-1e-400",
        '"a\\u0000b"',
        '"a\\nb"',
    ),
    *(
        '"../shards.bin"',
        '"/etc/passwd"',
        '"."',
        '""',
        '"a/b"',
        '"tokens.json"',
        '"' + "a" * 5000 + '"',
        '[["x"]]',
    ),
    *(
        "[" * 5000 + "]" * 5000,
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[" * 900 + "]" * 900,
        '"text"',
        '{"name": "x"}',
    ),
]
NAMES = [
    "a\nb.txt",
    "a\x1b[31mb.txt",
    "\u202e.txt",
    "é😀.txt",
    " ",
    "-x.txt",
    "a" * 255,
    ".hidden",
    "a b.jsonl",
    "val.bin",
]
SPECIAL = {"text.txt": "text", "docs.jsonl": "jsonl", "labelled.jsonl": "labelled"}


def base_files(seed: int) -> dict[str, Entry]:
    """Return good data of every form, by path."""
    draw = random.Random(f"data {seed}")
    lines = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 12))) for _ in range(120)]
    files: dict[str, Entry] = {
        "text.txt": "\n".join(lines).encode(),
        "docs.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in lines).encode(),
        "labelled.jsonl": "".join(
            json.dumps({"text": f"{number} {line}", "label": draw.choice("abc")}) + "\n"
            for number, line in enumerate(lines)
        ).encode(),
    }
    ids = np.random.default_rng(seed).integers(0, VOCAB, 1500)
    for name, magic, version, dtype in (
        ("raw", 0, 0, "<u2"),
        ("first", 20240520, 1, "<u2"),
        ("seventh", 20240801, 7, "<u4"),
    ):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(ids)
        files[f"{name}.bin"] = (header.tobytes() if magic else b"") + ids.astype(dtype).tobytes()
    files["shards/train_0.bin"] = files["shards/val_0.bin"] = ids.astype("<u2").tobytes()
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "docs.jsonl"
        source.write_bytes(files["docs.jsonl"])  # type: ignore[arg-type]
        for name, tokenizer in (("tokens", "bytes(end_of_text=True)"), ("pairs", f"bpe(vocab_size={VOCAB})")):
            out = Path(place) / name
            words = [
                "--out",
                str(out),
                "--tokenizer",
                tokenizer,
                "--validation",
                "0.1",
                "--shard_tokens",
                "1000",
            ]
            with contextlib.redirect_stdout(io.StringIO()):
                code = main(["tokenize", str(source), *words])
            if code:
                raise RuntimeError(f"{tokenizer} made no shards")
            files |= {f"{name}/{path.name}": path.read_bytes() for path in out.iterdir()}
    return files


def data_cases(count: int, *, seed: int, files: Mapping[str, Entry]) -> list[Case]:
    """Return `count` cases of a seed."""
    draw = random.Random(f"files {seed}")
    ways = [(_bytes, 6), (_header, 3), (_ids, 2), (_json, 8), (_lines, 5), (_structure, 5), (_tokenizer, 4)]
    chosen = draw.choices([way for way, _ in ways], [weight for _, weight in ways], k=count)
    return [way(draw, files) for way in chosen]


def _bytes(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """Bytes are lost, changed or put in."""
    name = draw.choice([*files])
    data = _data(files, name)
    place, length = draw.randrange(len(data) + 1), draw.randrange(1, 40)
    ways: list[Callable[[], bytes]] = [
        lambda: data[:place],
        lambda: data[: draw.randrange(40)],
        lambda: data[:place] + data[place + length :],
        lambda: data[:place] + draw.randbytes(length) + data[place:],
        lambda: data[:place] + bytes(length) + data[place + length :],
        lambda: data[:place] + b"\xff\xfe\xed\xa0\x80" + data[place:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: b"",
        lambda: b"\0" * len(data),
        lambda: data + draw.randbytes(1),
        lambda: b"\n" * length,
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
    ]
    number = draw.randrange(len(ways))
    return _case(draw, files, name, ways[number](), f"{name}: bytes, way {number}, at {place}, {length}")


def _header(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """A number in a shard's header is another one."""
    name = draw.choice([name for name in files if name.endswith(".bin") and "raw" not in name])
    data = _data(files, name)
    header = np.frombuffer(data[:1024].ljust(1024, b"\0"), "<i4").copy()
    place = draw.randrange(4)
    header[place] = draw.choice([0, 1, -1, 7, 2**31 - 1, -(2**31), 20240520, 20240801, int(header[2]) + 1])
    return _case(
        draw, files, name, header.tobytes() + data[1024:], f"{name}: header[{place}] = {header[place]}"
    )


def _ids(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """Ids are too large, or there are few of them."""
    name = draw.choice([name for name in files if name.endswith(".bin")])
    data = _data(files, name)
    header, size = (0, 2) if "raw" in name or "shards" in name else (1024, 4 if "seventh" in name else 2)
    ids = np.frombuffer(data[header:], f"<u{size}").copy()
    few = draw.random() < 0.3
    if few:
        ids = ids[: draw.choice([1, 2, 8, 9])]
    else:
        ids[draw.randrange(len(ids)) :][: draw.choice([1, 5000])] = draw.choice(
            [VOCAB, 2 ** (8 * size) - 1, 256]
        )
    start = np.frombuffer(data[:header], "<i4").copy()
    if header:
        start[2] = len(ids)
    return _case(
        draw, files, name, start.tobytes() + ids.tobytes(), f"{name}: {len(ids)} ids, largest {ids.max()}"
    )


def _json(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """A value in a JSON file is another one, or missing, or there twice."""
    name = draw.choice(
        ["tokens/tokens.json", "pairs/tokens.json", "pairs/tokens.json", "pairs/tokenizer.json"]
    )
    text, words = _damage_json(draw, json.loads(_data(files, name)))
    changed = dict(files)
    if name == "pairs/tokenizer.json" and draw.random() < 0.8:
        changed["pairs/tokens.json"] = _with_fingerprint(_data(files, "pairs/tokens.json"), text)
    return _case(draw, changed, name, text.encode("utf-8", "surrogatepass"), f"{name}: {words}")


def _lines(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """A line of a JSONL file is damaged, or all are."""
    name = draw.choice(["docs.jsonl", "labelled.jsonl", "labelled.jsonl"])
    lines = _data(files, name).decode().splitlines()
    text, words = _damage_json(draw, json.loads(lines[0]))
    number = draw.randrange(len(lines))
    if draw.random() < 0.3:
        lines = [text] * len(lines)
    elif draw.random() < 0.2:
        lines = lines[: draw.randrange(4)]
    else:
        lines[number] = draw.choice([text, text, text[: len(text) // 2], text + text, "\x00", "[1]", "text"])
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return _case(draw, files, name, data, f"{name}: line {number}: {words}")


def _structure(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """Something that is no regular file stands in a file's place, or a file has a strange name."""
    name = draw.choice([*files])
    entry: Entry = draw.choice(
        [
            Folder(),
            Link(Path(name).name),
            Link("no-such"),
            Link("/etc/passwd"),
            Link("/dev/zero"),
            Link(".."),
            Pipe(),
        ]
    )
    if draw.random() < 0.6:
        return _case(draw, files, name, entry, f"{name} is {entry}")
    strange = draw.choice(NAMES)
    changed = {**files, f"folder/{strange}": _data(files, draw.choice([*files]))}
    if draw.random() < 0.5:
        changed[f"folder/loop{draw.randrange(9)}"] = Link("..")
    path = draw.choice(
        ["folder", f"folder/{strange}", "folder/", "text.txt/x", "", "no\nsuch", "/dev/null", "."]
    )
    return _finish(draw, changed, path, f"{path!r} with the file {strange!r}")


def _tokenizer(draw: random.Random, files: Mapping[str, Entry]) -> Case:
    """`jaxblock tokenize` reads a damaged tokenizer.json, or the config beside it."""
    name = "made/tokenizer.json"
    good = json.loads(_data(files, "pairs/tokenizer.json"))
    text, words = _damage_json(draw, good)
    changed = {**files, name: text.encode("utf-8", "surrogatepass")}
    if draw.random() < 0.3:
        name = "made/tokenizer_config.json"
        text, words = _damage_json(draw, {"eos_token": {"content": "<|endoftext|>"}})
        changed |= {
            "made/tokenizer.json": files["pairs/tokenizer.json"],
            name: text.encode("utf-8", "surrogatepass"),
        }
    arguments = ("tokenize", "text.txt", "--out", "made/out", "--tokenizer", "made/tokenizer.json")
    return Case("data", f"tokenize with {name}: {words}", arguments, changed, runs=True)


def _case(draw: random.Random, files: Mapping[str, Entry], name: str, entry: Entry, words: str) -> Case:
    """Return the case of one changed file; a folder that is read whole has it among the good ones."""
    folder, _, _ = name.rpartition("/")
    path = folder or name
    if folder == "shards" and draw.random() < 0.3:
        path = name
    return _finish(draw, {**files, name: entry}, path, words)


def _finish(draw: random.Random, files: Mapping[str, Entry], path: str, words: str) -> Case:
    flags = [f"--data.path={path}", "--run.dir=run"]
    if "labelled" in path or draw.random() < 0.03:
        flags.append("--run.task=classifier")
    elif draw.random() < 0.1:
        flags.append("--data.separator=10")
    if draw.random() < 0.2:
        flags.append("--data.seams=separate")
    if draw.random() < 0.1:
        flags.append("--sample.prompt=" + draw.choice(["fox 😀", "1 2 3", os.fsdecode(b"\xff")]))
    runs = draw.random() < (0.5 if "/" in words else 0.25)
    return Case("data", words, ("train", CONFIG, *flags), {**files, CONFIG: TINY}, runs)


def _data(files: Mapping[str, Entry], name: str) -> bytes:
    entry = files[name]
    if not isinstance(entry, bytes):
        raise TypeError(f"{name} is {entry}")
    return entry


def _damage_json(draw: random.Random, value: Any) -> tuple[str, str]:
    """Return the JSON text of a value with one thing done to it, and words for that."""
    marker, path, place = "@@raw@@", [], value
    while isinstance(place, dict | list) and place and (not path or draw.random() < 0.85):
        key = draw.choice([*place]) if isinstance(place, dict) else draw.randrange(len(place))
        path.append((place, key))
        place = place[key]
    inside, key = path[-1]
    way = draw.random()
    where = ".".join(str(part) for _, part in path)
    if way < 0.15:
        del inside[key]
        return json.dumps(value), f"without {where}"
    if way < 0.25 and isinstance(inside, dict):
        inside[marker] = inside[key]
        return json.dumps(value).replace(f'"{marker}"', json.dumps(key)), f"{where} twice"
    text = draw.choice(JSON_TEXTS)
    inside[key] = marker
    return json.dumps(value).replace(f'"{marker}"', text), f"{where} = {text[:60]}"


def _with_fingerprint(tokens: bytes, tokenizer: str) -> bytes:
    """Return a tokens.json that names a tokenizer's text as its own."""
    record = json.loads(tokens)
    end = record["tokenizer"]["end_of_text"]
    with contextlib.suppress(ValueError):  # a text without a UTF-8 form
        record["tokenizer"]["fingerprint"] = FileTokenizer(tokenizer, "x", end).fingerprint
    return json.dumps(record).encode()
