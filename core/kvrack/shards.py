"""Files of a cache that several ranks hold a part of each: one file a rank, named by it.

Every rank calls `save` with the same path, so the path alone must not decide the file's name, or
the last rank to write would be all that is left.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvrack.errors import SnapshotError
from kvrack.model import Shard

MARK = re.compile(r"\.rank(\d+)of(\d+)(?=\.|$)")


def part_path(path: str | Path, shard: Shard | None) -> Path:
    """Return the file of this rank: ``prefix.rank0of2.kv`` for ``prefix.kv``. A name that says it already stays."""
    whole = Path(path)
    if shard is None or _mark(shard) in (match.group() for match in MARK.finditer(whole.name)):
        return whole
    return whole.with_name(f"{whole.stem}{_mark(shard)}{whole.suffix}")


def find_part(path: str | Path, shard: Shard | None) -> Path:
    """Return the file to load for this rank; that at `path` itself where the rank has none of its own.

    Raises SnapshotError where only another number of ranks saved this path.
    """
    whole, part = Path(path), part_path(path, shard)
    if part.is_file() or whole.is_file():
        return part if part.is_file() else whole
    pattern = re.compile(rf"{re.escape(whole.stem)}{MARK.pattern}{re.escape(whole.suffix)}")
    names = sorted(each.name for each in whole.parent.glob("*"))
    found = {int(match.group(2)): name for name in reversed(names) if (match := pattern.fullmatch(name))}
    if found and (shard is None or shard.count not in found):
        count, name = min(found.items())
        raise _refusal(f"{whole} was saved by {count} ranks, a file each ({name}, ...)", shard)
    return part


def check_shard(source: Path, saved: Shard | None, shard: Shard | None) -> None:
    """Raise SnapshotError unless a file that `saved` wrote is to be loaded as `shard`."""
    if saved != shard:
        whose = "a model that is not split over ranks" if saved is None else str(saved)
        raise _refusal(f"{source} was saved by {whose}", shard)


def _refusal(what: str, shard: Shard | None) -> SnapshotError:
    here = "a model that is not split" if shard is None else str(shard)
    return SnapshotError(
        f"{what}, and is to be loaded for {here}. Load it in as many ranks as saved it, each with its own shard, "
        "or fill a cache anew",
        fault="other shard",
    )


def _mark(shard: Shard) -> str:
    return f".rank{shard.rank}of{shard.count}"
