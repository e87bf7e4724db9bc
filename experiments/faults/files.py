"""Files that a run reads and someone, or the disk, has harmed: checkpoints, token shards."""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from experiments.faults.laboratory import (
    Laboratory,
    Trial,
    content,
    difference,
    end_of,
    first_fault,
    last_line,
    not_one_sentence,
    saved_steps,
    stopped_midway,
)

SHARD_TOKENS = 600


def truncate(path: Path, draw: random.Random) -> None:
    """Cut a file somewhere."""
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def flip_bit(path: Path, draw: random.Random) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def delete(path: Path, draw: random.Random) -> None:
    """Remove a file."""
    path.unlink()


HARMS: Mapping[str, Callable[[Path, random.Random], None]] = {
    "truncated": truncate,
    "bit-flipped": flip_bit,
    "incomplete": delete,
}


def damaged_runs(lab: Laboratory, trials: int) -> Iterator[Trial]:
    """Yield runs whose newest checkpoint was harmed: named, set aside, and the one before leads to the same bits."""
    for name, harm in HARMS.items():
        for _ in range(trials):
            fault = _harm_newest(lab, harm)
            lab.say(f"{name} checkpoint: {fault or 'passed over, and the same bits'}")
            yield Trial(f"{name} checkpoint", fault)


def _harm_newest(lab: Laboratory, harm: Callable[[Path, random.Random], None]) -> str | None:
    run, flags = lab.path("damaged"), lab.flags(seed=1)
    unbroken = lab.unbroken(flags)
    fault = stopped_midway(lab, run, flags)
    newest = run / "checkpoints" / str(saved_steps(run)[-1])
    path = lab.draw.choice(sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size))
    harm(path, lab.draw)
    ended = end_of(lab.go_on(run, flags))
    where = f" ({path.name})"
    if ended.code:
        return f"exit code {ended.code}: {last_line(ended)}{where}"
    if f"checkpoint {newest.name} in" not in ended.words or "is damaged" not in ended.words:
        return f"no sentence says that it is damaged{where}"
    if not (run / "damaged" / newest.name).is_dir():
        return f"it was not set aside{where}"
    return first_fault(fault, difference(run, unbroken))


def shard_runs(lab: Laboratory, trials: int) -> Iterator[Trial]:
    """Yield runs that miss a shard when they go on: refused, nothing changed; with it back, the same bits."""
    tokens = lab.path("tokens")
    words = (str(lab.text), "--out", str(tokens), "--shard_tokens", str(SHARD_TOKENS), "--validation", "0.2")
    ended = end_of(lab.command("tokenize", *words))
    if ended.code:
        yield Trial("deleted shard", f"the shards could not be made: {last_line(ended)}")
        return
    bare = lab.path("shards")
    shutil.copytree(tokens, bare)
    (bare / "tokens.json").unlink()
    for name, data in (("deleted shard of a token folder", tokens), ("deleted shard of plain shards", bare)):
        for _ in range(trials):
            fault = _without_shard(lab, data)
            lab.say(f"{name}: {fault or 'refused; restored, the same bits'}")
            yield Trial(name, fault)


def _without_shard(lab: Laboratory, data: Path) -> str | None:
    run, flags = lab.path("shardless"), lab.flags(seed=1, data=data)
    lab.unbroken(flags)
    fault = stopped_midway(lab, run, flags)
    shard, aside = lab.draw.choice(sorted(data.glob("*.bin"))), lab.path("aside")
    before = content(run)
    shard.rename(aside)
    ended = end_of(lab.go_on(run, flags))
    fault = first_fault(fault, not_one_sentence(ended, code=2, names=""))
    changed = None if content(run) == before else "files of the run have changed"
    aside.rename(shard)
    return first_fault(fault, changed) or lab.fault_at_end(run, flags)
